//! Experiment files: lists of parameter values that expand to cases, with inclusions and exclusions.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::error::ConfigError;
use super::schema::FlagValue;
use ltx2_base::with_defaults;

/// XLA options by name.
pub(crate) type Flags = BTreeMap<String, FlagValue>;

with_defaults! {
    /// Experiment file (`experiments/`): the cases to compile and compare. The cases are all combinations of the
    /// configurations, slices or targets, layouts, meshes, shapes and flags, except those that match `exclude`,
    /// followed by the cases of `include`.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Experiment {
        /// Heading of the report.
        pub(crate) title: String = String::new(),
        /// Configuration of all cases: a YAML file next to this one, or a shipped configuration.
        pub(crate) config: String = "ltx2".into(),
        /// Configurations to compare, instead of `config`.
        pub(crate) configs: Vec<String> = Vec::new(),
        /// Overrides of the configuration, as for `--set`, e.g. `sampler.steps=4`.
        pub(crate) set: Vec<String> = Vec::new(),
        /// Program to compile, as for `compile --program`.
        pub(crate) program: String = "denoise".into(),
        /// Number of transformer blocks to compile; null for all.
        #[schemars(range(min = 1))]
        pub(crate) layers: Option<usize> = None,
        /// Timeout per case, in seconds.
        #[schemars(range(min = 1))]
        pub(crate) timeout: u64 = 1800,
        /// TPU slices to compare, instead of `targets`. Each key names a configuration file that overrides `config`,
        /// and each value lists the target devices of the slice, e.g. `tpu/v6e-8: tpu:v6e:2x4`.
        #[schemars(with = "BTreeMap<String, String>")]
        pub(crate) slices: Slices = Slices::default(),
        /// Layout files next to this one, or shipped layouts. An empty list uses the layout of the slice or of the
        /// configuration.
        pub(crate) layouts: Vec<String> = Vec::new(),
        /// Meshes, as for `--mesh`. An empty list uses the mesh of the slice or of the layout.
        pub(crate) meshes: Vec<String> = Vec::new(),
        /// Video sizes as `WIDTHxHEIGHTxFRAMES`. An empty list uses the configured size.
        pub(crate) shapes: Vec<String> = Vec::new(),
        /// Target devices, as for `compile --target`.
        pub(crate) targets: Vec<String> = Vec::new(),
        /// Sets of XLA options to compare; each set overrides options of the configuration.
        pub(crate) flags: Vec<Flags> = Vec::new(),
        /// Additional cases. Each entry expands to all combinations of its values. A key that the entry omits uses the
        /// first value of the corresponding list of the file, except `mesh`, which uses the mesh of the slice or of the
        /// layout.
        pub(crate) include: Vec<Cases> = Vec::new(),
        /// Combinations to remove: those that match an entry in all keys that the entry sets.
        pub(crate) exclude: Vec<Cases> = Vec::new(),
    }
}

/// Parameters of one case ([`Case`]), or lists of their values ([`Cases`]).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Cases")]
pub struct Parameters<T: Default, F: Default> {
    /// Configuration: a file next to the experiment, or a shipped configuration.
    pub(crate) config: T,
    /// TPU slice: a key of `slices`.
    pub(crate) slice: T,
    /// Layout: a file next to the experiment, or a shipped layout.
    pub(crate) layout: T,
    /// Mesh, as for `--mesh`.
    pub(crate) mesh: T,
    /// Video size as `WIDTHxHEIGHTxFRAMES`, as for `--shape`.
    pub(crate) shape: T,
    /// Target devices, as for `--target`.
    pub(crate) target: T,
    /// XLA options.
    pub(crate) flags: F,
}

/// Parameters of one case; `None` uses the value of the configuration.
pub(crate) type Case = Parameters<Option<String>, Option<Flags>>;
/// Entry of `include` or `exclude`.
pub(super) type Cases = Parameters<Option<OneOrMany<String>>, Option<OneOrMany<Flags>>>;
/// Lists of values whose Cartesian product yields the cases; an empty list counts as one `None`.
type Lists = Parameters<Vec<String>, Vec<Flags>>;

/// A value, or a list of values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(inline)]
pub enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    pub(super) fn as_slice(&self) -> &[T] {
        match self {
            OneOrMany::One(value) => std::slice::from_ref(value),
            OneOrMany::Many(values) => values,
        }
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [T] {
        match self {
            OneOrMany::One(value) => std::slice::from_mut(value),
            OneOrMany::Many(values) => values,
        }
    }
}

/// TPU slices with their target devices, in file order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Slices(pub(super) Vec<(String, String)>);

impl Slices {
    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.0.iter().map(|(name, _)| name)
    }

    fn target(&self, name: &str) -> Option<String> {
        self.0.iter().find(|(slice, _)| slice == name).map(|(_, target)| target.clone())
    }
}

impl<'de> Deserialize<'de> for Slices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Keep the file order: `include` entries use the first slice by default.
        let slices = Map::<String, Value>::deserialize(deserializer)?.into_iter();
        let pairs = slices.map(|(name, target)| Ok((name, String::deserialize(target).map_err(D::Error::custom)?)));
        pairs.collect::<Result<_, _>>().map(Slices)
    }
}

impl Serialize for Slices {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, target)| (name, target)))
    }
}

impl Cases {
    /// Returns whether a case matches this entry in all keys that the entry sets.
    fn cover(&self, case: &Case) -> bool {
        fn agrees<T: PartialEq>(named: &Option<OneOrMany<T>>, value: &Option<T>) -> bool {
            let named = named.as_ref().map_or(&[][..], OneOrMany::as_slice);
            named.is_empty() || value.as_ref().is_some_and(|value| named.contains(value))
        }
        agrees(&self.config, &case.config)
            && agrees(&self.slice, &case.slice)
            && agrees(&self.layout, &case.layout)
            && agrees(&self.mesh, &case.mesh)
            && agrees(&self.shape, &case.shape)
            && agrees(&self.target, &case.target)
            && agrees(&self.flags, &case.flags)
    }
}

impl Case {
    /// Returns the width, height and number of frames of the case's shape; `None` if the case sets no shape.
    ///
    /// # Errors
    /// Returns an error if the shape is not `WIDTHxHEIGHTxFRAMES`.
    pub(crate) fn size(&self) -> Result<Option<[usize; 3]>, ConfigError> {
        let Some(shape) = &self.shape else { return Ok(None) };
        let sizes: Option<Vec<usize>> = shape.split('x').map(|n| n.parse().ok()).collect();
        match sizes.and_then(|s| <[usize; 3]>::try_from(s).ok()) {
            Some(size) => Ok(Some(size)),
            None => Err(ConfigError::argument(format!("shape '{shape}' is not WIDTHxHEIGHTxFRAMES, e.g. 768x512x121"))),
        }
    }

    /// Returns the shape as `key=value` overrides.
    pub(crate) fn size_settings(&self) -> Result<Vec<String>, ConfigError> {
        let sizes = ["width", "height", "num_frames"].into_iter().zip(self.size()?.into_iter().flatten());
        Ok(sizes.map(|(key, size)| format!("request.{key}={size}")).collect())
    }
}

impl Lists {
    /// Returns the number of combinations.
    fn count(&self) -> usize {
        let Parameters { config, slice, layout, mesh, shape, target, flags } = self;
        let sizes = [config, slice, layout, mesh, shape, target].map(Vec::len).into_iter().chain([flags.len()]);
        sizes.fold(1, |product, size| product.saturating_mul(size.max(1)))
    }

    /// Returns all combinations; the last key changes fastest.
    fn product(&self) -> Vec<Case> {
        let mut all = vec![Case::default()];
        times(&mut all, &self.target, |case| &mut case.target);
        times(&mut all, &self.slice, |case| &mut case.slice);
        times(&mut all, &self.config, |case| &mut case.config);
        times(&mut all, &self.shape, |case| &mut case.shape);
        times(&mut all, &self.mesh, |case| &mut case.mesh);
        times(&mut all, &self.layout, |case| &mut case.layout);
        times(&mut all, &self.flags, |case| &mut case.flags);
        all
    }
}

/// Replaces each case by one copy per value, with `key` set to the value. If `values` is empty, the cases stay
/// unchanged.
fn times<T: Clone>(cases: &mut Vec<Case>, values: &[T], key: impl Fn(&mut Case) -> &mut Option<T>) {
    let with = |case: &Case, value: &T| {
        let mut case = case.clone();
        *key(&mut case) = Some(value.clone());
        case
    };
    if !values.is_empty() {
        *cases = cases.iter().flat_map(|case| values.iter().map(move |value| with(case, value))).collect();
    }
}

impl Experiment {
    /// Returns the lists of values of the file; `None` if the file sets no layouts, targets or slices.
    fn lists(&self) -> Option<Lists> {
        let any = !self.layouts.is_empty() || !self.targets.is_empty() || !self.slices.0.is_empty();
        any.then(|| Parameters {
            config: self.configurations(),
            slice: self.slices.names().cloned().collect(),
            layout: self.layouts.clone(),
            mesh: self.meshes.clone(),
            shape: self.shapes.clone(),
            target: self.targets.clone(),
            flags: self.flags.clone(),
        })
    }

    /// Returns the lists of values of an `include` entry. A key that the entry omits has the first value of the file's
    /// list, except `mesh`, which stays unset.
    fn included(&self, cases: &Cases) -> Lists {
        fn chosen<T: Clone>(given: &Option<OneOrMany<T>>, mut first: impl Iterator<Item = T>) -> Vec<T> {
            match given.as_ref().map(OneOrMany::as_slice) {
                None | Some([]) => first.next().into_iter().collect(),
                Some(values) => values.to_vec(),
            }
        }
        Parameters {
            config: chosen(&cases.config, self.configurations().into_iter()),
            slice: chosen(&cases.slice, self.slices.names().cloned()),
            layout: chosen(&cases.layout, self.layouts.iter().cloned()),
            mesh: chosen(&cases.mesh, std::iter::empty()),
            shape: chosen(&cases.shape, self.shapes.iter().cloned()),
            target: chosen(&cases.target, self.targets.iter().cloned()),
            flags: chosen(&cases.flags, self.flags.iter().cloned()),
        }
    }

    fn configurations(&self) -> Vec<String> {
        if self.configs.is_empty() { vec![self.config.clone()] } else { self.configs.clone() }
    }

    /// Returns the number of cases, including excluded ones and duplicates.
    pub(super) fn count(&self) -> usize {
        let included = self.include.iter().map(|cases| self.included(cases));
        self.lists().into_iter().chain(included).fold(0, |sum, lists| sum.saturating_add(lists.count()))
    }

    /// Returns all cases, without duplicates.
    pub fn cases(&self) -> Vec<Case> {
        let mut all = self.lists().map_or_else(Vec::new, |lists| lists.product());
        let placed = |mut case: Case| {
            case.target = case.target.or_else(|| self.slices.target(case.slice.as_deref()?));
            case
        };
        all.retain(|case| !self.exclude.iter().any(|e| e.cover(case)));
        all.extend(self.include.iter().flat_map(|cases| self.included(cases).product()));
        let mut once: Vec<Case> = Vec::new();
        for case in all.into_iter().map(placed) {
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

    /// Returns the parameters of each case, joined by spaces.
    fn names(file: &Experiment) -> Vec<String> {
        let name = |c: &Case| {
            [&c.config, &c.slice, &c.layout, &c.mesh, &c.shape, &c.target].map(|v| v.clone().unwrap_or_default())
        };
        file.cases().iter().map(|case| name(case).join(" ").split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn cases_are_the_product_with_inclusions_and_exclusions() {
        let file = read(
            "layouts: [ulysses, own.yml]\ntargets: ['cpu:8', 'cpu:4']\nflags: [{}, {a: true}]\n\
             exclude: [{layout: ulysses, target: 'cpu:4'}]\ninclude: [{mesh: cfg=2, target: 'cpu:2'}, {target: 'cpu:8'}]\n",
        )
        .unwrap();
        assert_eq!(file.layouts, ["ulysses", "FOLDER/own.yml"]);
        let names = names(&file);
        // The last entry of `include` is already in the product.
        assert_eq!(names.len(), 7, "{names:?}");
        assert_eq!(names[6], "ltx2 ulysses cfg=2 cpu:2");
        assert!(!names.contains(&"ltx2 ulysses cpu:4".to_string()));
    }

    #[test]
    fn entry_with_lists_expands_to_all_combinations() {
        let file = read(
            "configs: [ltx2, ltx2_3]\nslices: {tpu/v6e-8: tpu:v6e:2x4, tpu/v5p-8: tpu:v5p:2x2x2}\nshapes: [64x64x9, 64x96x9]\n\
             exclude: [{config: [ltx2, ltx2_3], slice: tpu/v5p-8, shape: [64x96x9]}]\n\
             include: [{config: [ltx2, ltx2_3], layout: [ring, sequence]}, {slice: tpu/v5p-8, layout: ring, mesh: [context=8, cfg=2]}]\n",
        )
        .unwrap();
        assert_eq!(
            names(&file),
            [
                "ltx2 tpu/v6e-8 64x64x9 tpu:v6e:2x4",
                "ltx2 tpu/v6e-8 64x96x9 tpu:v6e:2x4",
                "ltx2_3 tpu/v6e-8 64x64x9 tpu:v6e:2x4",
                "ltx2_3 tpu/v6e-8 64x96x9 tpu:v6e:2x4",
                "ltx2 tpu/v5p-8 64x64x9 tpu:v5p:2x2x2",
                "ltx2_3 tpu/v5p-8 64x64x9 tpu:v5p:2x2x2",
                // An omitted key uses the first value of its list, in file order.
                "ltx2 tpu/v6e-8 ring 64x64x9 tpu:v6e:2x4",
                "ltx2 tpu/v6e-8 sequence 64x64x9 tpu:v6e:2x4",
                "ltx2_3 tpu/v6e-8 ring 64x64x9 tpu:v6e:2x4",
                "ltx2_3 tpu/v6e-8 sequence 64x64x9 tpu:v6e:2x4",
                "ltx2 tpu/v5p-8 ring context=8 64x64x9 tpu:v5p:2x2x2",
                "ltx2 tpu/v5p-8 ring cfg=2 64x64x9 tpu:v5p:2x2x2",
            ]
        );
        // An empty list and null both count as one `None`.
        let file = read("layouts: [ring]\ntargets: ['cpu:2']\ninclude: [{layout: [], mesh: null, target: 'cpu:4'}]\n");
        assert_eq!(names(&file.unwrap()), ["ltx2 ring cpu:2", "ltx2 ring cpu:4"]);
    }

    #[test]
    fn errors_have_the_line_number() {
        let fail = |text: &str| read(text).unwrap_err();
        assert_eq!(fail("layouts: [a]\nlayuots: [b]\n"), "x.yml:2: unknown key 'layuots'; did you mean 'layouts'?");
        assert_eq!(fail("layers: 0\n"), "x.yml:1: 'layers' must be a whole number of at least 1 or null, not 0");
        assert!(fail("layouts: [ulysses]\n").contains("a case has no target"));
        assert!(fail("title: t\n").contains("no cases: set layouts"));
        assert_eq!(
            fail("config: ltx2\n\nconfigs: [ltx2]\n"),
            "x.yml:3: 'config' and 'configs' are mutually exclusive; remove one"
        );
        let slices = "slices:\n  tpu/v6e-8: tpu:v6e:2x4\n";
        let fail_after = |text: &str| fail(&format!("{slices}{text}"));
        assert_eq!(
            fail_after("targets: ['cpu:8']\n"),
            "x.yml:3: 'slices' and 'targets' are mutually exclusive; remove one"
        );
        assert_eq!(
            fail_after("include:\n  - {layout: ring}\n  - {target: 'cpu:8'}\n"),
            "x.yml:5: 'slices' and 'target' are mutually exclusive; remove one"
        );
        assert_eq!(
            fail_after("  tpu/v6e-9: tpu:v6e:3x3\n"),
            "x.yml:3: 'slices': 'tpu/v6e-9' is neither a file nor a shipped configuration"
        );
        assert_eq!(
            fail_after("exclude:\n  - slice: [tpu/v6e-8, tpu/v5p-8]\n"),
            "x.yml:4: 'exclude: slice': 'tpu/v5p-8' is not one of the slices tpu/v6e-8"
        );
        assert_eq!(
            fail_after("include:\n  - confg: [ltx2]\n"),
            "x.yml:4: unknown key 'include[0].confg'; did you mean 'config'?"
        );
        assert_eq!(
            fail_after("include:\n  - shape: 3\n"),
            "x.yml:4: 'include[0].shape' must be text or a list or null, not 3 (quote it)"
        );
        assert_eq!(fail("slices: [tpu/v6e-8]\n"), "x.yml:1: 'slices' must be a map of keys, not a list");
        let needs = fail("targets: ['cpu:8']\ninclude: [{slice: tpu/v6e-8}]\n");
        assert_eq!(
            needs,
            "x.yml:2: 'include: slice': 'tpu/v6e-8' is not defined; add the slice and its target to 'slices'"
        );
        let list = format!("[{}]", vec!["a"; 70].join(", "));
        let many = fail(&format!("layouts: {list}\nmeshes: {list}\ntargets: ['cpu:8']\n"));
        assert_eq!(many, "x.yml: 4900 cases exceed the limit of 4000");
        let shape = fail("layouts: [a]\ntargets: ['cpu:8']\nshapes: [768x512]\n");
        assert!(shape.contains("shape '768x512' is not WIDTHxHEIGHTxFRAMES"), "{shape}");
    }
}
