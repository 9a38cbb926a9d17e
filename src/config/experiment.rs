//! Experiment files: cases as the product of lists, with cases added and left out.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::error::ConfigError;
use super::schema::FlagValue;
use crate::defaults::with_defaults;

/// XLA options by name.
pub(crate) type Flags = BTreeMap<String, FlagValue>;

with_defaults! {
    /// A file of `experiments/`: every layout with every mesh, shape, configuration, slice or target, and set of flags,
    /// without `exclude`; then `include`.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    pub struct Experiment {
        /// Heading of the report.
        pub(crate) title: String = String::new(),
        /// The configuration of all cases: a YAML file beside this one, or a shipped name.
        pub(crate) config: String = "ltx2".into(),
        /// Configurations, in place of `config`.
        pub(crate) configs: Vec<String> = Vec::new(),
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
        /// Files laid over the configuration, each with the devices that it is for, e.g. `tpu/v6e-8: tpu:v6e:2x4`; in place
        /// of `targets`.
        #[schemars(with = "BTreeMap<String, String>")]
        pub(crate) slices: Slices = Slices::default(),
        /// Layout files beside this one, or shipped names; none is the slice's own, or the configuration's.
        pub(crate) layouts: Vec<String> = Vec::new(),
        /// Meshes as `--mesh` takes them; none is the slice's, or the layout's own.
        pub(crate) meshes: Vec<String> = Vec::new(),
        /// `WIDTHxHEIGHTxFRAMES`; none is the configuration's own.
        pub(crate) shapes: Vec<String> = Vec::new(),
        /// Devices, as `compile --target` takes them.
        pub(crate) targets: Vec<String> = Vec::new(),
        /// XLA options of a case, over the configuration's.
        pub(crate) flags: Vec<Flags> = Vec::new(),
        /// More cases: every combination of what an entry lists. A key that it leaves out is the first of the file's list, but
        /// `mesh` the slice's or the layout's own.
        pub(crate) include: Vec<Cases> = Vec::new(),
        /// Cases of the lists that agree with an entry in all that it names are left out.
        pub(crate) exclude: Vec<Cases> = Vec::new(),
    }
}

/// Keys by which cases differ: one value of each ([`Case`]), or those that a file lists ([`Cases`]).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Cases")]
pub struct Parameters<T: Default, F: Default> {
    /// Configuration of the case: a file next to the experiment, or a shipped name.
    pub(crate) config: T,
    /// Slice of the case: a key of `slices`.
    pub(crate) slice: T,
    /// Layout of the case: a file next to the experiment, or a shipped name.
    pub(crate) layout: T,
    /// Mesh of the case, as `--mesh` takes it.
    pub(crate) mesh: T,
    /// Size of the video, as `--shape` takes it.
    pub(crate) shape: T,
    /// Devices of the case, as `--target` takes them.
    pub(crate) target: T,
    /// XLA options.
    pub(crate) flags: F,
}

/// One case; what is none is the configuration's own.
pub(crate) type Case = Parameters<Option<String>, Option<Flags>>;
/// Several cases, as `include` and `exclude` name them.
pub(super) type Cases = Parameters<Option<OneOrMany<String>>, Option<OneOrMany<Flags>>>;
/// Values whose product is the cases; an empty list counts as one value, none.
type Lists = Parameters<Vec<String>, Vec<Flags>>;

/// A value, or a list of them.
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

/// Slices by name, each with its target, in the order of the file.
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
        // This map keeps the order of the file, in which the first is what `include` leaves out.
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
    /// Whether a case agrees with one of these in all that they name.
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

impl Lists {
    /// Number of cases of the product.
    fn count(&self) -> usize {
        let Parameters { config, slice, layout, mesh, shape, target, flags } = self;
        let sizes = [config, slice, layout, mesh, shape, target].map(Vec::len).into_iter().chain([flags.len()]);
        sizes.fold(1, |product, size| product.saturating_mul(size.max(1)))
    }

    /// Every combination; the last key changes fastest.
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

/// Each case with each value.
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
    /// Values of the file's own product; none where the file is of `include` alone.
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

    /// Values that an entry of `include` stands for.
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

    /// Number of cases before any is left out.
    pub(super) fn count(&self) -> usize {
        let included = self.include.iter().map(|cases| self.included(cases));
        self.lists().into_iter().chain(included).fold(0, |sum, lists| sum.saturating_add(lists.count()))
    }

    /// The cases, each once.
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

    /// Values of a case, or of all, by their keys' first letters.
    fn names(file: &Experiment) -> Vec<String> {
        let name = |c: &Case| {
            [&c.config, &c.slice, &c.layout, &c.mesh, &c.shape, &c.target].map(|v| v.clone().unwrap_or_default())
        };
        file.cases().iter().map(|case| name(case).join(" ").split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn cases_are_a_product_with_additions_and_omissions() {
        let file = read(
            "layouts: [ulysses, own.yml]\ntargets: ['cpu:8', 'cpu:4']\nflags: [{}, {a: true}]\n\
             exclude: [{layout: ulysses, target: 'cpu:4'}]\ninclude: [{mesh: cfg=2, target: 'cpu:2'}, {target: 'cpu:8'}]\n",
        )
        .unwrap();
        assert_eq!(file.layouts, ["ulysses", "FOLDER/own.yml"]);
        let names = names(&file);
        // The last of `include` is a case of the product.
        assert_eq!(names.len(), 7, "{names:?}");
        assert_eq!(names[6], "ltx2 ulysses cfg=2 cpu:2");
        assert!(!names.contains(&"ltx2 ulysses cpu:4".to_string()));
    }

    #[test]
    fn an_entry_of_lists_is_their_product() {
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
                // What is left out is the first of its list, in the file's order.
                "ltx2 tpu/v6e-8 ring 64x64x9 tpu:v6e:2x4",
                "ltx2 tpu/v6e-8 sequence 64x64x9 tpu:v6e:2x4",
                "ltx2_3 tpu/v6e-8 ring 64x64x9 tpu:v6e:2x4",
                "ltx2_3 tpu/v6e-8 sequence 64x64x9 tpu:v6e:2x4",
                "ltx2 tpu/v5p-8 ring context=8 64x64x9 tpu:v5p:2x2x2",
                "ltx2 tpu/v5p-8 ring cfg=2 64x64x9 tpu:v5p:2x2x2",
            ]
        );
        // Nothing is one value, none: an empty list, null.
        let file = read("layouts: [ring]\ntargets: ['cpu:2']\ninclude: [{layout: [], mesh: null, target: 'cpu:4'}]\n");
        assert_eq!(names(&file.unwrap()), ["ltx2 ring cpu:2", "ltx2 ring cpu:4"]);
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        let fail = |text: &str| read(text).unwrap_err();
        assert_eq!(fail("layouts: [a]\nlayuots: [b]\n"), "x.yml:2: unknown key 'layuots'; did you mean 'layouts'?");
        assert_eq!(fail("layers: 0\n"), "x.yml:1: 'layers' must be a whole number of at least 1 or null, not 0");
        assert!(fail("layouts: [ulysses]\n").contains("a case has no target"));
        assert!(fail("title: t\n").contains("no case is left"));
        assert_eq!(
            fail("config: ltx2\n\nconfigs: [ltx2]\n"),
            "x.yml:3: 'config' and 'configs' exclude each other; keep one"
        );
        let slices = "slices:\n  tpu/v6e-8: tpu:v6e:2x4\n";
        let fail_after = |text: &str| fail(&format!("{slices}{text}"));
        assert_eq!(fail_after("targets: ['cpu:8']\n"), "x.yml:3: 'slices' and 'targets' exclude each other; keep one");
        assert_eq!(
            fail_after("include:\n  - {layout: ring}\n  - {target: 'cpu:8'}\n"),
            "x.yml:5: 'slices' and 'target' exclude each other; keep one"
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
        assert_eq!(needs, "x.yml:2: 'include: slice': 'tpu/v6e-8' needs 'slices', which names it and its target");
        let list = format!("[{}]", vec!["a"; 70].join(", "));
        let many = fail(&format!("layouts: {list}\nmeshes: {list}\ntargets: ['cpu:8']\n"));
        assert_eq!(many, "x.yml: 4900 cases are more than 4000");
        let shape = fail("layouts: [a]\ntargets: ['cpu:8']\nshapes: [768x512]\n");
        assert!(shape.contains("shape '768x512' is not WIDTHxHEIGHTxFRAMES"), "{shape}");
    }
}
