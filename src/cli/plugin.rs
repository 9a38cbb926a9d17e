//! `ltx2 plugin install`: downloads and installs the pinned plugin of a platform.

mod index;
mod settings;

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use zip::ZipArchive;

use self::index::{DownloadedWheel, WheelIndex};
use self::settings::PluginSettings;
use super::{UsageError, one_line, print, tell};
use crate::atomic_file::sync_folder;
use crate::pjrt::discover::{self, Platform};
use crate::runtime::platform;
use crate::runtime::platforms::{Wheel, spec};
use crate::temporaries;

/// Arguments of `ltx2 plugin`.
#[derive(Debug, clap::Args)]
pub(crate) struct PluginArgs {
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
    /// Platform of the plugin
    #[arg(value_parser = platforms())]
    pub(crate) platform: Platform,
    /// Folder to install plugins in [default: ./plugins in a checkout, else ~/.local/share/ltx2/plugins]
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// URL of the only package index to use [default: pip's or uv's settings, else https://pypi.org/simple]
    #[arg(long, value_name = "URL")]
    pub(crate) index: Option<String>,
}

fn platforms() -> impl TypedValueParser<Value = Platform> {
    let values = Platform::ALL.iter().rev().map(|one| PossibleValue::new(one.name()).help(spec(*one).description));
    PossibleValuesParser::new(values).map(|name| Platform::named(&name).expect("a possible value"))
}

/// File in a plugin's folder that lists the installed wheels and the size of the plugin file; written last.
const STAMP: &str = "installed.txt";

pub(crate) fn run(args: &PluginArgs) -> Result<()> {
    let Action::Install(install) = &args.action;
    let folder = match &install.dir {
        Some(folder) => folder.clone(),
        None => default_folder()?,
    };
    let file = install_plugin(install.platform, &folder, install.index.as_deref())?;
    print(&format!("{}\n", file.display()))
}

/// Returns `./plugins` in a checkout of this project, otherwise the user's data folder.
fn default_folder() -> Result<PathBuf> {
    if Path::new("crates/pjrt/Cargo.toml").is_file() {
        return Ok("plugins".into());
    }
    discover::data_folder().context("no folder for plugins: pass --dir DIR or set HOME")
}

/// Environment variable that, if `off`, disables the installation of a missing CPU plugin.
const DOWNLOAD_VARIABLE: &str = "LTX2_PLUGIN_DOWNLOAD";

/// Makes commands that open a device install a missing CPU plugin, unless `LTX2_PLUGIN_DOWNLOAD` is `off`.
///
/// # Errors
/// Returns an error if the variable is neither `on` nor `off`.
pub(super) fn install_if_missing() -> Result<()> {
    match std::env::var(DOWNLOAD_VARIABLE).as_deref() {
        Err(std::env::VarError::NotPresent) | Ok("" | "on") => platform::install_missing_with(install_missing),
        Ok("off") => {}
        other => {
            let value = other.map_or("not UTF-8".into(), |value| format!("'{value}'"));
            return Err(UsageError(format!("{DOWNLOAD_VARIABLE} is {value}; set it to on or off")).into());
        }
    }
    Ok(())
}

fn install_missing(kind: Platform) -> Result<(), String> {
    let install = || -> Result<PathBuf> {
        let folder = default_folder()?;
        tell(format_args!(
            "no {} plugin found; downloading the pinned one ({}) to {} ({DOWNLOAD_VARIABLE}=off disables this)",
            kind.name(),
            spec(kind).description,
            folder.display()
        ));
        install_plugin(kind, &folder, None)
    };
    install().map(drop).map_err(|error| one_line(&error))
}

/// Installs a platform's plugin below `folder` unless its pinned version is installed. Returns the plugin file. `index`:
/// the only package index to use; `None`: pip's settings.
fn install_plugin(kind: Platform, folder: &Path, index: Option<&str>) -> Result<PathBuf> {
    let target = folder.join(kind.name());
    let wheels = spec(kind).wheels;
    let stamp: String = wheels.iter().map(|w| format!("{}=={} sha256:{}\n", w.package, w.version, w.sha256)).collect();
    let size = |folder: &Path| Some(discover::in_folder(kind, folder)?.metadata().ok()?.len());
    // A file that was deleted or truncated is installed again.
    let is_current = || {
        let text = fs::read_to_string(target.join(STAMP)).ok();
        let recorded = text.as_ref().and_then(|text| text.strip_prefix(&*stamp));
        let recorded = recorded.map(|rest| rest.strip_prefix("size:").and_then(|rest| rest.trim().parse::<u64>().ok()));
        recorded.is_some_and(|recorded| size(&target).is_some_and(|size| recorded.is_none_or(|own| own == size)))
    };
    if !is_current() {
        fs::create_dir_all(folder).with_context(|| format!("{}: cannot create the folder", folder.display()))?;
        let alone = lock_install(folder, kind)?;
        if is_current() {
            // Another process installed it while this one waited for the lock.
            return installed(kind, &target);
        }
        // The temporary folder is in the target's parent folder, so that the last step is a rename.
        let prefix = format!(".install-{}-", kind.name());
        if alone.is_some() {
            remove_stale_installs(folder, &prefix)?;
        }
        let work = tempfile::Builder::new().prefix(&prefix).tempdir_in(folder);
        let work = work.with_context(|| format!("{}: cannot write", folder.display()))?;
        temporaries::note(work.path());
        let fresh = work.path().join("new");
        fs::create_dir(&fresh)?;
        // Without a lock, another install may write to the same folder.
        let kept = match alone {
            Some(_) => folder.join(format!(".{}.download", kind.name())),
            None => work.path().join("download"),
        };
        let index = WheelIndex::new(PluginSettings::read(index)?)?;
        for (n, wheel) in wheels.iter().enumerate() {
            let label = format!("[{}/{}] {} {}", n + 1, wheels.len(), wheel.package, wheel.version);
            tell(&label);
            let started = Instant::now();
            let file = download(&index, wheel, work.path(), &kept)?;
            let (bytes, seconds) = (fs::metadata(&file)?.len() as f64, started.elapsed().as_secs_f64());
            tell(format_args!("{label}: downloaded {:.0} MB in {seconds:.1} s, SHA-256 correct", bytes / 1e6));
            unpack(&file, &fresh)?;
        }
        let size = size(&fresh).map_or(String::new(), |size| format!("size:{size}\n"));
        fs::write(fresh.join(STAMP), stamp + &size)?;
        // The stamp marks the plugin as complete, so the files must be on disk first, in case the machine crashes.
        sync_all(&fresh).with_context(|| format!("{}: cannot write", fresh.display()))?;
        if target.exists() {
            fs::rename(&target, work.path().join("old"))
                .with_context(|| format!("{}: cannot replace", target.display()))?;
        }
        fs::rename(&fresh, &target)
            .with_context(|| format!("{}: cannot move the installed plugin to this path", target.display()))?;
        sync_folder(folder).with_context(|| format!("{}: cannot write", folder.display()))?;
        if kept.exists() {
            fs::remove_dir_all(&kept).with_context(|| format!("{}: cannot remove", kept.display()))?;
        }
    }
    installed(kind, &target)
}

fn installed(kind: Platform, target: &Path) -> Result<PathBuf> {
    discover::in_folder(kind, target)
        .with_context(|| format!("{}: contains no plugin file; delete the folder and install again", target.display()))
}

/// Locks a platform's plugin in a folder until the returned file is dropped or the process exits; waits while another
/// install holds the lock. Returns `None` on shared file systems without locks: concurrent installs then duplicate each
/// other's work.
fn lock_install(folder: &Path, kind: Platform) -> Result<Option<File>> {
    let path = folder.join(format!(".{}.lock", kind.name()));
    let file = File::create(&path).with_context(|| format!("{}: cannot write", path.display()))?;
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        tell(format_args!("waiting for another install (lock file {})", path.display()));
    }
    match file.lock() {
        Ok(()) => Ok(Some(file)),
        Err(error) => {
            tracing::warn!(
                "{}: cannot lock: {error}; files of earlier killed installs are not removed",
                path.display()
            );
            Ok(None)
        }
    }
}

/// Removes temporary folders of killed installs.
fn remove_stale_installs(folder: &Path, prefix: &str) -> Result<()> {
    for entry in fs::read_dir(folder)?.flatten().filter(|e| e.file_name().to_string_lossy().starts_with(prefix)) {
        fs::remove_dir_all(entry.path()).with_context(|| format!("{}: cannot remove", entry.path().display()))?;
    }
    Ok(())
}

/// Flushes all files below a folder to disk.
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

/// Gets a wheel and verifies its checksum. `kept`: the folder of interrupted downloads.
fn download(index: &WheelIndex, wheel: &Wheel, work: &Path, kept: &Path) -> Result<PathBuf> {
    let DownloadedWheel { path, sha256: sum } = index.download(wheel, work, kept)?;
    if sum != wheel.sha256 {
        fs::remove_file(&path).with_context(|| format!("{}: cannot remove", path.display()))?;
        let (package, version, pinned) = (wheel.package, wheel.version, wheel.sha256);
        bail!("{package}=={version}: sha256 is {sum}, expected {pinned}: refusing to install an unknown file");
    }
    Ok(path)
}

/// Unpacks a wheel, keeping executable permissions (needed by the CUDA compiler).
fn unpack(wheel: &Path, folder: &Path) -> Result<()> {
    let unpacked = || -> Result<()> {
        let mut archive = ZipArchive::new(io::BufReader::new(File::open(wheel)?))?;
        for n in 0..archive.len() {
            let mut entry = archive.by_index(n)?;
            let name = entry.name()?.into_owned();
            let inner = entry
                .enclosed_name()
                .with_context(|| format!("the archive entry '{name}' points outside the folder"))?;
            let path = folder.join(inner);
            if entry.is_dir() {
                fs::create_dir_all(&path)?;
                continue;
            }
            fs::create_dir_all(path.parent().unwrap_or(folder))?;
            let mut file = File::create(&path).with_context(|| format!("{}: cannot write", path.display()))?;
            io::copy(&mut entry, &mut file).with_context(|| format!("cannot unpack '{name}'"))?;
            if entry.unix_mode().is_some_and(|mode| mode & 0o111 != 0) {
                file.set_permissions(fs::Permissions::from_mode(0o755))?;
            }
        }
        Ok(())
    };
    unpacked().with_context(|| format!("{}: cannot unpack", wheel.display()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn current_plugin_is_not_reinstalled() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("cpu");
        let file = target.join("lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "x").unwrap();
        let wheel = spec(Platform::Cpu).wheels[0];
        let stamp = format!("{}=={} sha256:{}\n", wheel.package, wheel.version, wheel.sha256);
        fs::write(target.join(STAMP), stamp).unwrap();
        assert_eq!(install_plugin(Platform::Cpu, folder.path(), None).unwrap(), file);
        assert_eq!(fs::read_to_string(&file).unwrap(), "x");
    }

    fn wheel_file(entries: &[(&str, u32)]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.whl");
        let mut archive = zip::ZipWriter::new(File::create(&path).unwrap());
        for (name, mode) in entries {
            let options = zip::write::SimpleFileOptions::default().unix_permissions(*mode);
            archive.start_file(*name, options).unwrap();
            archive.write_all(name.repeat(1000).as_bytes()).unwrap();
        }
        archive.finish().unwrap();
        (folder, path)
    }

    #[test]
    fn unpacked_wheel_keeps_executable_permissions() {
        let (folder, wheel) = wheel_file(&[("bin/ptxas", 0o755), ("lib/a.so", 0o644)]);
        let target = folder.path().join("new");
        unpack(&wheel, &target).unwrap();
        let mode = |name: &str| fs::metadata(target.join(name)).unwrap().permissions().mode() & 0o111;
        assert_eq!((mode("bin/ptxas"), mode("lib/a.so")), (0o111, 0));
        assert_eq!(fs::read_to_string(target.join("lib/a.so")).unwrap(), "lib/a.so".repeat(1000));
    }

    #[test]
    fn damaged_or_escaping_wheel_is_rejected() {
        let (folder, wheel) = wheel_file(&[("../outside", 0o644)]);
        let error = format!("{:#}", unpack(&wheel, &folder.path().join("new")).unwrap_err());
        assert!(
            error.contains("a.whl: cannot unpack: the archive entry '../outside' points outside the folder"),
            "{error}"
        );
        assert!(!folder.path().join("outside").exists());
        let (folder, wheel) = wheel_file(&[("lib/a.so", 0o644)]);
        let mut bytes = fs::read(&wheel).unwrap();
        // Change a byte of the entry's data, which follows the header and the name.
        bytes[30 + "lib/a.so".len() + 20] ^= 0xff;
        fs::write(&wheel, bytes).unwrap();
        let error = format!("{:#}", unpack(&wheel, &folder.path().join("new")).unwrap_err());
        assert!(error.contains("a.whl: cannot unpack: ") && wheel.exists(), "{error}");
    }

    #[test]
    fn sha256_matches_known_value() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "abc").unwrap();
        assert_eq!(
            crate::runtime::sha256_file(file.path()).unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
