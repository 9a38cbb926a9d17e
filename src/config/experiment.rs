//! Experiment files: cases as the product of lists, with cases added and left out.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::schema::FlagValue;
use crate::defaults::with_defaults;

with_defaults! {
    /// A file of `experiments/`: every layout with every mesh, shape, target and set of flags; then `include`, without
    /// `exclude`.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Experiment {
        /// Heading of the report.
        pub(crate) title: String = String::new(),
        /// The configuration of all cases: a YAML file beside this one, or a shipped name.
        pub(crate) config: String = "ltx2".into(),
        /// Keys of it, each as `--set` takes it, e.g. `sampler.steps=4`.
        pub(crate) set: Vec<String> = Vec::new(),
        /// The program that is compiled, as `compile --program` names it.
        pub(crate) program: String = "denoise".into(),
        /// Blocks of the transformer that are compiled; all if not given.
        #[schemars(range(min = 1))]
        pub(crate) layers: Option<usize> = None,
        /// Seconds after which a case is given up.
        #[schemars(range(min = 1))]
        pub(crate) timeout: u64 = 1800,
        /// Layout files beside this one, or shipped names; none is the configuration's own.
        pub(crate) layouts: Vec<String> = Vec::new(),
        /// Meshes as `--mesh` takes them; none is the layout's own.
        pub(crate) meshes: Vec<String> = Vec::new(),
        /// `WIDTHxHEIGHTxFRAMES`; none is the configuration's own.
        pub(crate) shapes: Vec<String> = Vec::new(),
        /// Devices, as `compile --target` takes them.
        pub(crate) targets: Vec<String> = Vec::new(),
        /// XLA options of a case, over the configuration's.
        pub(crate) flags: Vec<BTreeMap<String, FlagValue>> = Vec::new(),
        /// More cases; what one does not name is the first of its list.
        pub(crate) include: Vec<Case> = Vec::new(),
        /// Cases that agree with one of these in all that it names are left out.
        pub(crate) exclude: Vec<Case> = Vec::new(),
    }
}

/// One case, or a part of one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Case {
    /// Layout of the case: a file next to the experiment, or a shipped name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) layout: Option<String>,
    /// Mesh of the case, as `--mesh` takes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mesh: Option<String>,
    /// Size of the video, as `--shape` takes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) shape: Option<String>,
    /// Devices of the case, as `--target` takes them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) target: Option<String>,
    /// XLA options.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) flags: Option<BTreeMap<String, FlagValue>>,
}

impl Case {
    /// Whether a case agrees with this one in all that this one names.
    fn covers(&self, case: &Case) -> bool {
        fn agrees<T: PartialEq>(own: &Option<T>, other: &Option<T>) -> bool {
            own.is_none() || own == other
        }
        agrees(&self.layout, &case.layout)
            && agrees(&self.mesh, &case.mesh)
            && agrees(&self.shape, &case.shape)
            && agrees(&self.target, &case.target)
            && agrees(&self.flags, &case.flags)
    }

    /// Width, height and frames.
    ///
    /// # Errors
    /// A shape that is not three numbers.
    pub(crate) fn size(&self) -> Result<Option<[usize; 3]>, ConfigError> {
        let Some(shape) = &self.shape else { return Ok(None) };
        let sizes: Option<Vec<usize>> = shape.split('x').map(|n| n.parse().ok()).collect();
        match sizes.and_then(|s| <[usize; 3]>::try_from(s).ok()) {
            Some(size) => Ok(Some(size)),
            None => Err(ConfigError::Flag(format!("shape '{shape}' is not WIDTHxHEIGHTxFRAMES, e.g. 768x512x121"))),
        }
    }

    /// The shape as `key=value` pairs of a configuration.
    pub(crate) fn size_settings(&self) -> Result<Vec<String>, ConfigError> {
        let sizes = ["width", "height", "num_frames"].into_iter().zip(self.size()?.into_iter().flatten());
        Ok(sizes.map(|(key, size)| format!("request.{key}={size}")).collect())
    }
}

/// Every element of a list, or nothing once where the list is empty.
fn each<T: Clone>(list: &[T]) -> Vec<Option<T>> {
    if list.is_empty() { vec![None] } else { list.iter().cloned().map(Some).collect() }
}

impl Experiment {
    /// The cases, each once.
    pub fn cases(&self) -> Vec<Case> {
        let mut all = Vec::new();
        for target in each(&self.targets) {
            for shape in each(&self.shapes) {
                for mesh in each(&self.meshes) {
                    for layout in each(&self.layouts) {
                        for flags in each(&self.flags) {
                            let (target, shape, mesh) = (target.clone(), shape.clone(), mesh.clone());
                            all.push(Case { layout: layout.clone(), mesh, shape, target, flags });
                        }
                    }
                }
            }
        }
        // A file of `include` alone has no product.
        if self.layouts.is_empty() && self.targets.is_empty() {
            all.clear();
        }
        all.retain(|case| !self.exclude.iter().any(|e| e.covers(case)));
        for case in &self.include {
            let case = case.clone();
            all.push(Case {
                layout: case.layout.or_else(|| self.layouts.first().cloned()),
                mesh: case.mesh,
                shape: case.shape.or_else(|| self.shapes.first().cloned()),
                target: case.target.or_else(|| self.targets.first().cloned()),
                flags: case.flags.or_else(|| self.flags.first().cloned()),
            });
        }
        let mut once: Vec<Case> = Vec::new();
        for case in all {
            if !once.contains(&case) {
                once.push(case);
            }
        }
        once
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::read_experiment;

    fn read(text: &str) -> Result<Experiment, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.yml");
        std::fs::write(&path, text).unwrap();
        std::fs::write(folder.path().join("own.yml"), "rules: {}\n").unwrap();
        let short = |text: String| text.replace(&format!("{}/", folder.path().display()), "");
        read_experiment(&path).map_err(|e| short(e.to_string())).map(|mut e| {
            e.layouts.iter_mut().for_each(|l| *l = short(std::mem::take(l)).replace("own.yml", "FOLDER/own.yml"));
            e
        })
    }

    #[test]
    fn cases_are_a_product_with_additions_and_omissions() {
        let file = read(
            "layouts: [ulysses, own.yml]\ntargets: ['cpu:8', 'cpu:4']\nflags: [{}, {a: true}]\n\
             exclude: [{layout: ulysses, target: 'cpu:4'}]\ninclude: [{mesh: cfg=2, target: 'cpu:2'}, {target: 'cpu:8'}]\n",
        )
        .unwrap();
        assert_eq!(file.layouts, ["ulysses", "FOLDER/own.yml"]);
        let cases = file.cases();
        let name = |c: &Case| [&c.layout, &c.mesh, &c.target].map(|v| v.clone().unwrap_or_default()).join(" ");
        let names: Vec<String> = cases.iter().map(name).collect();
        // The last of `include` is a case of the product.
        assert_eq!(cases.len(), 7, "{names:?}");
        assert_eq!(names[6], "ulysses cfg=2 cpu:2");
        assert!(!names.contains(&"ulysses  cpu:4".to_string()));
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        let fail = |text: &str| read(text).unwrap_err();
        assert_eq!(fail("layouts: [a]\nlayuots: [b]\n"), "x.yml:2: unknown key 'layuots'; did you mean 'layouts'?");
        assert_eq!(fail("layers: 0\n"), "x.yml:1: 'layers' must be a whole number of at least 1 or null, not 0");
        assert!(fail("layouts: [ulysses]\n").contains("a case has no target"));
        assert!(fail("title: t\n").contains("no case is left"));
        let shape = fail("layouts: [a]\ntargets: ['cpu:8']\nshapes: [768x512]\n");
        assert!(shape.contains("shape '768x512' is not WIDTHxHEIGHTxFRAMES"), "{shape}");
    }
}
