use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::*;
use crate::analysis::Predicted;
use crate::config::Case;
use crate::nn::Role;
use crate::tune::case_result::{CaseResult, GroupDiagnosis};
use crate::tune::compile_report::tests::{gather, placed, report};
use crate::tune::compile_report::{ChipRates, CollectiveEntry, TensorPlacement};

/// Returns the JSON block that the page's script reads.
fn data(page: &str) -> Value {
    let start = page.find("id=\"data\">").expect("data") + "id=\"data\">".len();
    let end = start + page[start..].find("</script>").expect("its end");
    serde_json::from_str(&page[start..end]).expect("JSON")
}

#[test]
fn case_text_never_becomes_markup() {
    let evil = "</script><img src=x onerror='a()'>\"&";
    let row = |label: &str, report| CaseResult {
        case: Case::default(),
        label: label.into(),
        precision: None,
        report,
        measured: Some(0.02),
        error: Some(evil.into()),
        compiler: None,
        room: None,
    };
    let mut report = report("cpu:2");
    report.layout = evil.into();
    report.chip = Some(ChipRates { name: evil.into(), peak: 4e14, bandwidth: 2e12 });
    report.predicted_ms =
        Some(Predicted { compute: 1.0, memory: 2.0, collective: 3.0, step: 4.0, ..Predicted::default() });
    report.collectives.list = vec![CollectiveEntry { reason: evil.into(), ..gather(evil, None, 0.1) }];
    let rules = vec![evil.to_string()];
    report.tensors = vec![TensorPlacement { rules, ..placed(evil, Role::Parameter, ["embed", "mlp"]) }];
    let rows = vec![row(evil, Some(report)), row("failed", None)];
    let diagnosis = Some(GroupDiagnosis { label: evil.into(), result: Err(evil.into()) });
    let groups = [CaseGroup { parts: [evil.into(), String::new(), String::new()], rows, diagnosis }];
    let page = page(evil, &groups);
    assert!(!page.contains("<img"));
    // Besides the libraries, three elements end with this tag: the data, the licenses and the page's own script.
    assert_eq!(page.matches("</script>").count(), 3 + LIBRARIES.len());
    // The script gets the case's text unchanged.
    let data = data(&page);
    assert_eq!(data["tensors"][0]["tensor"], evil);
    assert_eq!(data["tensors"][0]["sharding"], "bf16[8, 8{context}]");
    assert_eq!(data["collectives"][0]["reason"], evil);
    let group = &data["groups"][0];
    assert_eq!((&group["name"], &group["diagnosis"]["failure"]), (&evil.into(), &evil.into()));
    assert_eq!(group["cases"][0]["compiled"]["predicted_ms"]["step"], 4.0);
    assert_eq!(group["cases"][0]["measured_ms"], 20.0);
    assert_eq!((&group["cases"][1]["compiled"], &group["cases"][1]["error"]), (&Value::Null, &evil.into()));
}

#[test]
fn page_fetches_nothing() {
    let page = page("t", &synthetic::groups(3));
    let own = LIBRARIES.iter().chain([&LICENSES]).fold(page, |page, library| page.replace(library, ""));
    assert!(!own.contains("http:") && !own.contains("https:") && !own.contains(" src="));
    assert!(own.contains("default-src 'none'"));
}

#[test]
fn suggestions_have_gain_unit_and_layout() {
    let data = data(&page("t", &synthetic::groups(60)));
    for (group, unit) in [(0, "milliseconds"), (1, "received_bytes")] {
        let diagnosis = &data["groups"][group]["diagnosis"];
        assert_eq!(diagnosis["unit"], unit);
        let first = &diagnosis["suggestions"][0];
        assert!(first["gain"].as_f64().is_some_and(|gain| (gain - 0.214).abs() < 1e-9), "{first}");
        assert_eq!((&first["price"], &first["change"]), (&"none".into(), &"rules: drop mlp: fsdp".into()));
        assert_eq!(first["difference"]["lost"][0]["bytes"], 4.1e7);
        assert!(first["layout"].as_str().is_some_and(|yaml| yaml.contains("mesh:")));
        assert_eq!(diagnosis["rejected"][0]["reason"], "does not fit into device memory");
    }
}

#[test]
fn shared_placements_are_written_once() {
    let data = data(&page("t", &synthetic::groups(60)));
    let cases =
        data["groups"].as_array().into_iter().flatten().flat_map(|g| g["cases"].as_array().into_iter().flatten());
    let all: usize = cases.filter_map(|c| c["compiled"]["tensors"].as_array()).map(Vec::len).sum();
    let distinct = data["tensors"].as_array().map_or(0, Vec::len);
    assert!(all == 57 * 120 && distinct < all / 2, "{distinct} of {all}");
}

/// `make report-page` opens the reports that this test writes; see scripts/tune/check.py.
#[test]
fn synthetic_reports_stay_small() {
    for count in [60, 400] {
        let page = page(&format!("Made-up report of {count} cases"), &synthetic::groups(count));
        assert!(page.len() < 4_000_000, "{count} cases: {} bytes", page.len());
        if let Some(folder) = std::env::var_os("LTX2_WRITE_REPORTS") {
            std::fs::write(Path::new(&folder).join(format!("report-{count}.html")), page).expect("a folder");
        }
    }
}

#[test]
fn vendored_libraries_match_published_hashes() {
    let named = include_str!("vendor/files.sha256");
    for (library, name) in LIBRARIES.iter().zip(["d3.min.js", "plot.umd.min.js"]) {
        assert!(named.contains(&format!("{}  {name}\n", hex::encode(Sha256::digest(library)))), "{name}");
        assert!(library.len() < 1_000_000 && !library.contains("</script"), "{name}");
    }
    assert!(!LICENSES.contains("</script"));
}
