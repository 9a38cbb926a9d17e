//! `ltx2 plugin install`: fetches the pinned plugin of a platform.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::{print, tell};
use crate::media::sync_folder;
use crate::pjrt::discover;
use crate::runtime::plugins::{Wheel, wheels};
use crate::runtime::sha256_file;

/// Arguments of `ltx2 plugin`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Subcommand to run.
    #[command(subcommand)]
    pub(crate) action: Action,
}

/// Subcommands of `ltx2 plugin`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// Download a platform's plugin at its pinned version, check its SHA-256 and unpack it
    Install(Install),
}

/// Arguments of `ltx2 plugin install`.
#[derive(Debug, clap::Args)]
pub(crate) struct Install {
    /// Platform to install the plugin of
    pub(crate) platform: Platform,
    /// Folder of plugins [default: ./plugins in a checkout, else ~/.local/share/ltx2/plugins]
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}

/// A platform that has a plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Platform {
    /// The host's processor
    Cpu,
    /// NVIDIA GPUs (CUDA 13, driver 580 or newer; about 3 GB unpacked)
    Cuda,
    /// Cloud TPU
    Tpu,
}

/// Written last into a plugin's folder: what it was made of.
const STAMP: &str = "installed.txt";

/// Unpacks a wheel with the files' permissions, which `python3 -m zipfile` drops and the CUDA compiler needs.
const UNPACK: &str = "\
import os, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for item in wheel.infolist():
        path = wheel.extract(item, sys.argv[2])
        if item.external_attr >> 16 & 0o111 and os.path.isfile(path):
            os.chmod(path, 0o755)
";

pub(crate) fn run(args: &Args) -> Result<()> {
    let Action::Install(install) = &args.action;
    let kind = match install.platform {
        Platform::Cpu => discover::Platform::Cpu,
        Platform::Cuda => discover::Platform::Cuda,
        Platform::Tpu => discover::Platform::Tpu,
    };
    let folder = match &install.dir {
        Some(folder) => folder.clone(),
        None => default_folder()?,
    };
    print(&format!("{}\n", install_plugin(kind, &folder)?.display()))
}

/// `./plugins` where that is the project's, else the user's data folder.
fn default_folder() -> Result<PathBuf> {
    let folders = discover::plugin_folders();
    let here = Path::new("plugins");
    if here.is_dir() || Path::new("Cargo.toml").is_file() {
        return Ok(here.to_owned());
    }
    folders.last().cloned().context("no folder for plugins: give --dir DIR or set HOME")
}

/// Installs a platform's plugin below `folder` unless it is there at its pinned version; returns the plugin file.
pub(crate) fn install_plugin(kind: discover::Platform, folder: &Path) -> Result<PathBuf> {
    let target = folder.join(kind.name());
    let stamp: String =
        wheels(kind).iter().map(|w| format!("{}=={} sha256:{}\n", w.package, w.version, w.sha256)).collect();
    let is_current = || fs::read_to_string(target.join(STAMP)).is_ok_and(|text| text == stamp);
    if !is_current() {
        fs::create_dir_all(folder).with_context(|| format!("{}: cannot create the folder", folder.display()))?;
        let alone = alone_in(folder, kind)?;
        if is_current() {
            // Who was waited for has done it.
            return installed(kind, &target);
        }
        // In the target's folder, so that the last step is a rename.
        let prefix = format!(".install-{}-", kind.name());
        if alone.is_some() {
            remove_left(folder, &prefix)?;
        }
        let work = tempfile::Builder::new().prefix(&prefix).tempdir_in(folder);
        let work = work.with_context(|| format!("{}: cannot write", folder.display()))?;
        let fresh = work.path().join("new");
        fs::create_dir(&fresh)?;
        for (index, wheel) in wheels(kind).iter().enumerate() {
            tell(format_args!("[{}/{}] {} {}", index + 1, wheels(kind).len(), wheel.package, wheel.version));
            unpack(&download(wheel, work.path())?, &fresh)?;
        }
        fs::write(fresh.join(STAMP), &stamp)?;
        // The stamp says that all of it is there, also to a machine that stops before it is on the disk.
        sync_all(&fresh).with_context(|| format!("{}: cannot write", fresh.display()))?;
        if target.exists() {
            fs::rename(&target, work.path().join("old"))
                .with_context(|| format!("{}: cannot replace", target.display()))?;
        }
        fs::rename(&fresh, &target).with_context(|| format!("{}: cannot move the plugin there", target.display()))?;
        sync_folder(folder).with_context(|| format!("{}: cannot write", folder.display()))?;
    }
    installed(kind, &target)
}

fn installed(kind: discover::Platform, target: &Path) -> Result<PathBuf> {
    discover::in_folder(kind, target)
        .with_context(|| format!("{}: holds no plugin file; delete the folder and install again", target.display()))
}

/// A lock on a platform's plugin in a folder: another install there waits until it is dropped, and it ends with its process. None on
/// shared file systems without locks: two installs then do the work twice.
fn alone_in(folder: &Path, kind: discover::Platform) -> Result<Option<File>> {
    let path = folder.join(format!(".{}.lock", kind.name()));
    let file = File::create(&path).with_context(|| format!("{}: cannot write", path.display()))?;
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        tell(format_args!("waiting for another install ({})", path.display()));
    }
    match file.lock() {
        Ok(()) => Ok(Some(file)),
        Err(error) => {
            tracing::warn!("{}: cannot be locked: {error}; what killed installs left there stays", path.display());
            Ok(None)
        }
    }
}

/// Removes what installs left that were killed.
fn remove_left(folder: &Path, prefix: &str) -> Result<()> {
    for entry in fs::read_dir(folder)?.flatten().filter(|e| e.file_name().to_string_lossy().starts_with(prefix)) {
        fs::remove_dir_all(entry.path()).with_context(|| format!("{}: cannot be removed", entry.path().display()))?;
    }
    Ok(())
}

/// Waits until all files below a folder are on the disk.
fn sync_all(folder: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()? {
            kind if kind.is_dir() => sync_all(&entry.path())?,
            kind if kind.is_file() => File::open(entry.path())?.sync_all()?,
            _ => {}
        }
    }
    sync_folder(folder)
}

fn download(wheel: &Wheel, work: &Path) -> Result<PathBuf> {
    let folder = work.join(wheel.package);
    let requirement = format!("{}=={}", wheel.package, wheel.version);
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]);
    pip.args(["--platform", wheel.platform]);
    if let Some(python) = wheel.python {
        let abi = format!("cp{}", python.replace('.', ""));
        pip.args(["--implementation", "cp", "--python-version", python, "--abi", &abi]);
    }
    let output = pip.arg("--dest").arg(&folder).arg(&requirement).output();
    let output = output.context("python3 does not run; plugins are fetched with `python3 -m pip`: install both")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        bail!("{requirement}: `python3 -m pip download` failed: {}", lines.join(" | "));
    }
    let mut files = fs::read_dir(&folder)?.flatten().map(|entry| entry.path());
    let file = files.find(|path| path.extension().is_some_and(|extension| extension == "whl"));
    let file = file.with_context(|| format!("{requirement}: pip downloaded no wheel"))?;
    let sum = sha256_file(&file).with_context(|| format!("{}: cannot read", file.display()))?;
    if sum != wheel.sha256 {
        bail!("{requirement}: sha256 is {sum}, expected {}: the file is not the one this program trusts", wheel.sha256);
    }
    Ok(file)
}

fn unpack(wheel: &Path, folder: &Path) -> Result<()> {
    let output = Command::new("python3").args(["-c", UNPACK]).arg(wheel).arg(folder).output();
    let output = output.context("python3 does not run")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("{}: cannot unpack: {}", wheel.display(), text.lines().last().unwrap_or_default());
    }
    // The wheel may be large; nothing reads it again.
    fs::remove_file(wheel).with_context(|| format!("{}: cannot delete", wheel.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_installed_plugin_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("cpu");
        let file = target.join("lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "x").unwrap();
        let wheel = wheels(discover::Platform::Cpu)[0];
        let stamp = format!("{}=={} sha256:{}\n", wheel.package, wheel.version, wheel.sha256);
        fs::write(target.join(STAMP), stamp).unwrap();
        assert_eq!(install_plugin(discover::Platform::Cpu, folder.path()).unwrap(), file);
        assert_eq!(fs::read_to_string(&file).unwrap(), "x");
    }

    #[test]
    fn sums() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "abc").unwrap();
        assert_eq!(
            sha256_file(file.path()).unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
