//! Settings of a package index: those of pip, from `PIP_*` variables and `pip.conf`, so that a mirror is configured once.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

/// The public package index.
const PYPI: &str = "https://pypi.org/simple";
/// Longest wait for a connection, for an answer, and for the next bytes of one.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Where wheels are looked for, and how the places are reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    /// Folders and pages that list wheels (`find-links`); searched before the indexes.
    pub(super) links: Vec<String>,
    /// URLs of simple indexes (`index-url`, then `extra-index-url`); none with `no-index`.
    pub(super) indexes: Vec<String>,
    /// PEM file of certificate authorities (`cert`). `None`: those of `SSL_CERT_FILE`, `SSL_CERT_DIR` or the system.
    pub(super) cert: Option<PathBuf>,
    /// URL of a proxy (`proxy`). `None`: that of `HTTPS_PROXY` and the like.
    pub(super) proxy: Option<String>,
    /// See [`TIMEOUT`] (`timeout`).
    pub(super) timeout: Duration,
}

impl Settings {
    /// Reads the environment and the configuration files of pip.
    ///
    /// # Errors
    /// A configuration file that exists and cannot be read; a timeout that is not a number of seconds.
    pub(super) fn read() -> Result<Settings> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let mut values = HashMap::new();
        for file in files(variable) {
            match fs::read_to_string(&file) {
                Ok(text) => values.extend(options(&text)),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).with_context(|| format!("{}: cannot read", file.display())),
            }
        }
        Settings::from(&values, variable)
    }

    /// Settings of the files' options, each overridden by its variable.
    fn from(values: &HashMap<String, String>, variable: impl Fn(&str) -> Option<String>) -> Result<Settings> {
        let option = |key: &str| {
            let name = format!("PIP_{}", key.to_uppercase().replace('-', "_"));
            variable(&name).or_else(|| values.get(key).cloned()).filter(|value| !value.trim().is_empty())
        };
        let list = |key: &str| -> Vec<String> {
            option(key).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
        };
        let is_on = |key: &str| option(key).is_some_and(|value| matches!(&*value, "1" | "true" | "yes" | "on"));
        let mut indexes = vec![option("index-url").unwrap_or_else(|| PYPI.into()).trim().to_owned()];
        indexes.extend(list("extra-index-url"));
        if is_on("no-index") {
            indexes.clear();
        }
        let seconds = option("timeout").or_else(|| option("default-timeout"));
        let timeout = match seconds {
            // pip's own default suits its retries; ours is never less.
            Some(text) => {
                let seconds = text.trim().parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
                seconds.with_context(|| format!("PIP_TIMEOUT: '{text}' is not a number of seconds"))?.max(TIMEOUT)
            }
            None => TIMEOUT,
        };
        Ok(Settings {
            links: list("find-links"),
            indexes,
            cert: option("cert").map(PathBuf::from),
            proxy: option("proxy"),
            timeout,
        })
    }
}

/// Configuration files in pip's order: the last one that has an option decides.
fn files(variable: impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let named = variable("PIP_CONFIG_FILE").map(PathBuf::from);
    if named.as_deref() == Some(Path::new("/dev/null")) {
        // pip's way to read none.
        return Vec::new();
    }
    let home = variable("HOME").map(PathBuf::from);
    let config = variable("XDG_CONFIG_HOME").map(PathBuf::from).or_else(|| Some(home.as_ref()?.join(".config")));
    let files = [
        Some("/etc/xdg/pip/pip.conf".into()),
        Some("/etc/pip.conf".into()),
        home.map(|home| home.join(".pip/pip.conf")),
        config.map(|config| config.join("pip/pip.conf")),
        variable("VIRTUAL_ENV").map(|folder| Path::new(&folder).join("pip.conf")),
        named,
    ];
    files.into_iter().flatten().collect()
}

/// Options of a `pip.conf` that a download reads: sections `global`, then `download`. A value may go on in indented lines.
fn options(text: &str) -> HashMap<String, String> {
    let (mut global, mut download) = (HashMap::new(), HashMap::new());
    let (mut section, mut last) = (String::new(), None::<String>);
    for line in text.lines().filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with(['#', ';'])) {
        let target = match &*section {
            "global" => &mut global,
            "download" => &mut download,
            _ => &mut HashMap::new(),
        };
        if let Some(name) = line.trim().strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            (section, last) = (name.trim().to_lowercase(), None);
        } else if let (true, Some(key)) = (line.starts_with([' ', '\t']), &last) {
            let value: &mut String = target.entry(key.clone()).or_default();
            *value = format!("{value} {}", line.trim());
        } else if let Some((key, value)) = line.split_once(['=', ':']) {
            let key = key.trim().to_lowercase().replace('_', "-");
            target.insert(key.clone(), value.trim().to_owned());
            last = Some(key);
        }
    }
    global.extend(download);
    global
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(files: &[&str], variables: &[(&str, &str)]) -> Result<Settings> {
        let mut values = HashMap::new();
        files.iter().for_each(|text| values.extend(options(text)));
        Settings::from(&values, |name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn variables_override_files_and_later_files_earlier_ones() {
        let none = settings(&[], &[]).unwrap();
        assert_eq!((&*none.indexes, none.links.len(), none.timeout), (&[PYPI.to_string()][..], 0, TIMEOUT));
        let site = "[global]\nindex-url = https://site/simple\ncert: /site.pem\n[install]\nindex-url = https://no\n";
        let user = "# mine\n[download]\nindex_url=https://download/simple\n[global]\nindex-url = https://user/simple\n\
                    extra-index-url =\n    https://a/simple\n    https://b/simple\n\n[global]\nproxy = http://p:1\n";
        let both = settings(&[site, user], &[]).unwrap();
        assert_eq!(both.indexes, ["https://download/simple", "https://a/simple", "https://b/simple"]);
        assert_eq!((both.cert, both.proxy), (Some("/site.pem".into()), Some("http://p:1".into())));
        let variables = [("PIP_INDEX_URL", "https://v/simple"), ("PIP_EXTRA_INDEX_URL", "https://c https://d")];
        assert_eq!(
            settings(&[site, user], &variables).unwrap().indexes,
            ["https://v/simple", "https://c", "https://d"]
        );
        let offline = settings(&[user], &[("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", "/a file:///b")]).unwrap();
        assert_eq!((offline.indexes, offline.links), (vec![], vec!["/a".to_string(), "file:///b".into()]));
    }

    #[test]
    fn a_timeout_is_a_number_of_seconds() {
        let timeout = |text: &str| settings(&[], &[("PIP_DEFAULT_TIMEOUT", text)]).map(|settings| settings.timeout);
        assert_eq!(timeout("180").unwrap(), Duration::from_secs(180));
        assert_eq!(timeout("15").unwrap(), TIMEOUT);
        for wrong in ["soon", "-1", "inf", "1e300"] {
            assert!(timeout(wrong).unwrap_err().to_string().contains(&format!("'{wrong}'")));
        }
    }

    #[test]
    fn files_are_those_of_pip() {
        let with = |variables: &[(&str, &str)]| {
            files(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
        };
        let own = ["/etc/xdg/pip/pip.conf", "/etc/pip.conf", "/h/.pip/pip.conf", "/h/.config/pip/pip.conf", "/c"];
        assert_eq!(with(&[("HOME", "/h"), ("PIP_CONFIG_FILE", "/c")]), own.map(PathBuf::from));
        assert_eq!(with(&[("HOME", "/h"), ("PIP_CONFIG_FILE", "/dev/null")]), Vec::<PathBuf>::new());
    }
}
