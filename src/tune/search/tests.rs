use super::*;
use crate::config::resolve_mesh;
use crate::runtime::Toolchain;

/// A layout that does not fit into memory does not exclude another layout with the same loops as a duplicate.
#[test]
fn duplicate_of_a_layout_that_does_not_fit_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let options = TuneOptions {
        binary: "ltx2".into(),
        folder: folder.path().to_path_buf(),
        modules: None,
        jobs: 1,
        measure: false,
        retry: false,
        chip: None,
    };
    let request = SearchRequest {
        given: CliOverrides { files: vec!["ltx2".into()], ..CliOverrides::default() },
        target: "tpu:v6e:2x4".into(),
        shapes: Vec::new(),
        videos: Vec::new(),
        program: None,
        layouts: Vec::new(),
        fit: true,
        memory: None,
        layers: 3,
        budget: 1,
        seconds: 1,
        timeout: 1,
        seed: 0,
        command: String::new(),
    };
    let target = options.target(&request.target).unwrap();
    let toolchain = Toolchain::of_kind("tpu", "TPU v6 lite");
    let chip = target.chip();
    let mesh = resolve_mesh(&crate::config::parse_mesh("cfg=2,context=2,tensor=2").unwrap(), 8).unwrap();
    let points = ["tensor", "tensor-encoder"].map(|name| {
        placed(name.into(), Some(name.into()), &read_layout_source(name).unwrap(), &mesh).expect("a mesh of it")
    });
    let devices = |capacity| RankingDevices { toolchain: &toolchain, count: 8, capacity, chip: chip.as_ref() };
    // Bytes per device of a run.
    let bytes = points.each_ref().map(|point| {
        let batch = WorkloadBatch::new(&request, None, devices(None)).unwrap();
        let estimator = &batch.workloads[0].estimator;
        estimator.parameters(point).unwrap() + estimator.estimate(point).unwrap().0.values
    });
    assert!(bytes[1] < bytes[0], "{bytes:?}");
    let reasons = |capacity| {
        let batches = vec![WorkloadBatch::new(&request, None, devices(Some(capacity))).unwrap()];
        let comparison = ComparisonBasis { parts: parts(&batches), timed: true, per_video: false };
        let mut search = LayoutSearch {
            request: &request,
            options: &options,
            compiler: CaseCompiler::open(&options).unwrap(),
            target: target.clone(),
            devices: devices(Some(capacity)),
            batches,
            comparison,
            seen: BTreeMap::new(),
            spent: 0,
            tried: Vec::new(),
            pruned: Vec::new(),
        };
        points.each_ref().map(|point| search.bounded(point, 0, false).err().map(|(reason, _)| reason))
    };
    assert_eq!(reasons((bytes[0] + bytes[1]) / 2), [Some(PruneReason::TooLarge), None]);
    assert_eq!(reasons(bytes[0]), [None, Some(PruneReason::Duplicate)]);
    assert_eq!(reasons(bytes[1] - 1), [Some(PruneReason::TooLarge); 2]);
}
