//! Package index settings, read from pip's and uv's variables and `pip.conf`, so that a mirror is configured only once.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

const PYPI: &str = "https://pypi.org/simple";
/// Timeout of connecting, of waiting for a response, and of each read.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Locations of wheels, and how to connect to them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PluginSettings {
    /// Folders and pages that list wheels (`find-links`); searched before the indexes.
    pub(super) links: Vec<String>,
    /// URLs of simple indexes: `--index`, else `index-url` or uv's default index, then `extra-index-url`. Empty with
    /// `no-index` and without `--index`.
    pub(super) indexes: Vec<String>,
    /// PEM file of certificate authorities (`cert`). `None`: those of `SSL_CERT_FILE`, `SSL_CERT_DIR` or the system.
    pub(super) cert: Option<PathBuf>,
    /// URL of a proxy (`proxy`). `None`: from `HTTPS_PROXY` and related variables.
    pub(super) proxy: Option<String>,
    /// Timeout (`timeout`); see [`TIMEOUT`].
    pub(super) timeout: Duration,
}

impl PluginSettings {
    /// Reads pip's and uv's environment variables and pip's configuration files. `index` (`--index`) replaces all
    /// locations in them.
    ///
    /// # Errors
    /// Returns an error if an existing configuration file cannot be read, or if the timeout is not a number of seconds.
    pub(super) fn read(index: Option<&str>) -> Result<PluginSettings> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let mut values = HashMap::new();
        for file in files(variable) {
            match fs::read_to_string(&file) {
                Ok(text) => values.extend(options(&text)),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).with_context(|| format!("{}: cannot read", file.display())),
            }
        }
        let settings = PluginSettings::from(&values, variable)?;
        Ok(match index {
            Some(url) => PluginSettings { links: Vec::new(), indexes: vec![url.to_owned()], ..settings },
            None => settings,
        })
    }

    /// Creates settings from file options, which environment variables override.
    fn from(values: &HashMap<String, String>, variable: impl Fn(&str) -> Option<String>) -> Result<PluginSettings> {
        let option = |key: &str| {
            let name = format!("PIP_{}", key.to_uppercase().replace('-', "_"));
            variable(&name).or_else(|| values.get(key).cloned()).filter(|value| !value.trim().is_empty())
        };
        let list = |key: &str| -> Vec<String> {
            option(key).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
        };
        let is_on = |key: &str| option(key).is_some_and(|value| matches!(&*value, "1" | "true" | "yes" | "on"));
        // pip's variable precedes uv's variables, which precede pip's files. uv allows `NAME=URL`.
        let of_uv = || ["UV_DEFAULT_INDEX", "UV_INDEX_URL"].into_iter().find_map(&variable).map(unnamed);
        let index = variable("PIP_INDEX_URL").or_else(of_uv).or_else(|| option("index-url"));
        let mut indexes = vec![index.unwrap_or_else(|| PYPI.into()).trim().to_owned()];
        indexes.extend(list("extra-index-url"));
        if is_on("no-index") {
            indexes.clear();
        }
        let seconds = option("timeout").or_else(|| option("default-timeout"));
        let timeout = match seconds {
            // pip's default of 15 s relies on its retries; use at least [`TIMEOUT`] here.
            Some(text) => {
                let seconds = text.trim().parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
                seconds.with_context(|| format!("PIP_TIMEOUT: '{text}' is not a number of seconds"))?.max(TIMEOUT)
            }
            None => TIMEOUT,
        };
        Ok(PluginSettings {
            links: list("find-links"),
            indexes,
            cert: option("cert").map(PathBuf::from),
            proxy: option("proxy"),
            timeout,
        })
    }
}

/// Removes the name from an index in uv's form `NAME=URL`.
fn unnamed(index: String) -> String {
    match index.split_once('=') {
        Some((name, url)) if !name.contains([':', '/']) => url.to_owned(),
        _ => index,
    }
}

/// Returns pip's configuration files in order; later files override earlier ones.
fn files(variable: impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let named = variable("PIP_CONFIG_FILE").map(PathBuf::from);
    if named.as_deref() == Some(Path::new("/dev/null")) {
        // `/dev/null` makes pip ignore all configuration files.
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

/// Parses the sections `global` and `download` of a `pip.conf`; `download` overrides `global`. Indented lines continue
/// a value.
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

    fn settings(files: &[&str], variables: &[(&str, &str)]) -> Result<PluginSettings> {
        let mut values = HashMap::new();
        files.iter().for_each(|text| values.extend(options(text)));
        PluginSettings::from(&values, |name| {
            variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn environment_overrides_files_and_later_files_win() {
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
        let uv = [("UV_INDEX_URL", "https://old/simple"), ("UV_DEFAULT_INDEX", "mirror=https://uv/simple?a=b")];
        assert_eq!(settings(&[user], &uv).unwrap().indexes[0], "https://uv/simple?a=b");
        assert_eq!(settings(&[user], &uv[..1]).unwrap().indexes[0], "https://old/simple");
        assert_eq!(settings(&[], &[variables[0], uv[1]]).unwrap().indexes, ["https://v/simple"]);
        let offline = settings(&[user], &[("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", "/a file:///b")]).unwrap();
        assert_eq!((offline.indexes, offline.links), (vec![], vec!["/a".to_string(), "file:///b".into()]));
    }

    #[test]
    fn timeout_must_be_a_number_of_seconds() {
        let timeout = |text: &str| settings(&[], &[("PIP_DEFAULT_TIMEOUT", text)]).map(|settings| settings.timeout);
        assert_eq!(timeout("180").unwrap(), Duration::from_secs(180));
        assert_eq!(timeout("15").unwrap(), TIMEOUT);
        for wrong in ["soon", "-1", "inf", "1e300"] {
            assert!(timeout(wrong).unwrap_err().to_string().contains(&format!("'{wrong}'")));
        }
    }

    #[test]
    fn config_files_match_those_of_pip() {
        let with = |variables: &[(&str, &str)]| {
            files(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
        };
        let own = ["/etc/xdg/pip/pip.conf", "/etc/pip.conf", "/h/.pip/pip.conf", "/h/.config/pip/pip.conf", "/c"];
        assert_eq!(with(&[("HOME", "/h"), ("PIP_CONFIG_FILE", "/c")]), own.map(PathBuf::from));
        assert_eq!(with(&[("HOME", "/h"), ("PIP_CONFIG_FILE", "/dev/null")]), Vec::<PathBuf>::new());
    }
}
