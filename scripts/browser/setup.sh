#!/usr/bin/env bash
# Installs the pinned Chromium, playwright and axe, if missing or outdated: scripts/browser/setup.sh FOLDER.
# Everything comes from package registries with checksums and is installed only in FOLDER, with its own font, so that pages look the
# same everywhere. Needs python3 with venv, and npm.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
wanted=$(cat "$here"/setup.sh "$here"/requirements.txt "$here"/packages.sha256 | sha256sum)
[ "$(cat "$1/ready" 2>/dev/null)" != "$wanted" ] || exit 0
command -v npm > /dev/null || { echo "setup.sh: no npm: install it (Debian: apt-get install npm)" >&2; exit 1; }
rm -rf "$1"/{ready,venv,package,fonts,fontconfig,lib}
mkdir -p "$1"
cd "$1"
python3 -m venv venv
venv/bin/pip install -q --require-hashes -r "$here/requirements.txt"
npm pack --silent @sparticuz/chromium@153.0.0 axe-core@4.14.1 > /dev/null
sha256sum --quiet -c "$here/packages.sha256"
tar -xzf axe-core-4.14.1.tgz package/axe.min.js
mv package/axe.min.js .
tar -xzf sparticuz-chromium-153.0.0.tgz package/bin

node=$(echo venv/lib/python3*/site-packages/playwright/driver/node)
"$node" -e '
  const fs = require("fs"), zlib = require("zlib");
  for (const name of ["chromium", "al2023.tar", "swiftshader.tar", "fonts.tar"])
    fs.writeFileSync(name, zlib.brotliDecompressSync(fs.readFileSync(`package/bin/${name}.br`)));'
chmod +x chromium
for part in al2023 swiftshader fonts; do tar -xf "$part.tar"; done
rm -rf package ./*.tgz ./*.tar
# Chromium crashes where no font is found.
mkdir fontconfig
cat > fontconfig/fonts.conf << END
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>$PWD/fonts</dir>
  <cachedir>$PWD/fontconfig/cache</cachedir>
  <alias><family>sans-serif</family><prefer><family>Open Sans</family></prefer></alias>
</fontconfig>
END
echo "$wanted" > ready
