//! HTML report of an experiment: one self-contained file.

mod charts;

use std::fmt::{Display, Write};

use serde_json::{Value, json};

use super::agreement::agreement;
use super::case_result::{CaseResult, Group};
use super::compile_report::{CompileReport, GIB};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

pub(crate) fn page(title: &str, groups: &[Group]) -> String {
    let title = escaped(title);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\"><title>{title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
    );
    for group in groups {
        let rows = &group.rows;
        add(&mut out, format_args!("<section><h2>{}</h2>\n", escaped(&group.name())));
        out.push_str(&overview(rows));
        if let Some(agreement) = agreement(rows) {
            add(&mut out, format_args!("<p>{}</p>\n", escaped(&agreement.text())));
        }
        let drawn: Vec<(&CaseResult, &CompileReport)> =
            rows.iter().filter_map(|r| Some((r, r.report.as_ref()?))).collect();
        if !drawn.is_empty() {
            out.push_str("<div class=\"charts\">");
            out.push_str(&charts::times(&drawn));
            out.push_str(&charts::memory(&drawn));
            out.push_str(&charts::roofline(&drawn));
            out.push_str(&charts::agreement(rows));
            out.push_str("</div>\n");
        }
        out.push_str("<h3>Collectives per step of the compiled blocks, by axis and kind</h3>\n");
        drawn.iter().for_each(|(row, report)| out.push_str(&collectives(row, report)));
        out.push_str("</section>\n");
    }
    out.push_str(
        "<section><h2>What changed between two cases</h2><p><select id=\"before\"></select> to \
         <select id=\"after\"></select></p><div id=\"changes\"></div></section>\n\
         <section><h2>Tensor placement</h2><p><select id=\"case\"></select> <input id=\"search\" type=\"search\" \
         placeholder=\"name, axis, rule …\"> <span id=\"count\"></span></p><table id=\"tensors\"></table></section>\n",
    );
    let data = data(groups).to_string().replace('<', "\\u003c");
    add(&mut out, format_args!("<script type=\"application/json\" id=\"data\">{data}</script>\n"));
    add(&mut out, format_args!("<script>{SCRIPT}</script>\n</body></html>\n"));
    out
}

fn add(out: &mut String, text: impl Display) {
    // Writing to a string cannot fail.
    let _ = write!(out, "{text}");
}

pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;").replace('\'', "&#39;")
}

fn overview(rows: &[CaseResult]) -> String {
    let mut out = String::from(
        "<table class=\"numbers\"><tr><th>case</th><th>predicted ms</th><th>measured ms</th><th>MB per block</th><th>received</th>\
         <th>GiB per device</th><th>compiled in</th></tr>\n",
    );
    for row in rows {
        let label = escaped(&row.label);
        let Some(f) = &row.report else {
            let why = escaped(row.error.as_deref().unwrap_or("failed"));
            add(&mut out, format_args!("<tr><td>{label}</td><td colspan=\"6\" class=\"bad\">{why}</td></tr>\n"));
            continue;
        };
        let ms = |v: Option<f64>| v.map_or(String::new(), |v| format!("{v:.2}"));
        let room = if f.fits() { "" } else { " class=\"bad\"" };
        add(
            &mut out,
            format_args!(
                "<tr><td>{label}</td><td>{}</td><td>{}</td><td>{:.1}</td><td>{:.1}</td><td{room}>{:.2}</td><td>{:.0} s</td></tr>\n",
                ms(row.predicted()),
                ms(row.measured.map(|s| s * 1e3)),
                f.collectives.per_layer_bytes / 1e6,
                f.collectives.per_layer_wire_bytes / 1e6,
                f.device_bytes() as f64 / GIB,
                f.compile_seconds,
            ),
        );
        if let Some(why) = &row.error {
            add(&mut out, format_args!("<tr><td></td><td colspan=\"6\" class=\"bad\">{}</td></tr>\n", escaped(why)));
        }
    }
    out + "</table>\n"
}

fn collectives(row: &CaseResult, f: &CompileReport) -> String {
    let mut sums: Vec<((String, String), [f64; 4])> = Vec::new();
    for e in &f.collectives.list {
        let key = (e.axes.join(", "), e.kind.clone());
        let own = [e.runs(), e.step_bytes(), e.runs() * e.wire_bytes, e.runs() * e.ms.unwrap_or(0.0)];
        match sums.iter_mut().find(|(k, _)| *k == key) {
            Some((_, sum)) => sum.iter_mut().zip(own).for_each(|(a, b)| *a += b),
            None => sums.push((key, own)),
        }
    }
    sums.sort_by(|a, b| b.1[1].total_cmp(&a.1[1]));
    let all: f64 = sums.iter().map(|(_, s)| s[1]).sum();
    let mut out = format!(
        "<details><summary>{}: {:.1} MB</summary><table><tr><th>axes</th><th>kind</th><th>runs</th><th>MB</th>\
         <th>MB received</th><th>ms on links</th></tr>\n",
        escaped(&row.label),
        all / 1e6
    );
    for ((axes, kind), [runs, bytes, wire, ms]) in sums {
        add(
            &mut out,
            format_args!(
                "<tr><td>{}</td><td>{}</td><td>{runs}</td><td>{:.3}</td><td>{:.3}</td><td>{ms:.3}</td></tr>\n",
                escaped(&axes),
                escaped(&kind),
                bytes / 1e6,
                wire / 1e6
            ),
        );
    }
    out + "</table></details>\n"
}

fn data(groups: &[Group]) -> Value {
    let several = groups.len() > 1;
    let cases = groups.iter().flat_map(|group| group.rows.iter().map(move |row| (group, row)));
    let cases = cases.filter_map(|(group, row)| {
        let f = row.report.as_ref()?;
        let tensors = f.tensors.iter().map(|t| json!([t.tensor, t.role, t.text(), t.axes, t.bytes, t.rules]));
        let collectives = f.collectives.list.iter().map(|e| {
            let what = e.tensor.as_deref().unwrap_or(&e.scope);
            json!([e.kind, what, e.axes.join(", "), e.runs(), e.step_bytes(), e.reason])
        });
        let label = if several { format!("{}, {}", row.label, group.name()) } else { row.label.clone() };
        let (tensors, collectives): (Vec<Value>, Vec<Value>) = (tensors.collect(), collectives.collect());
        Some(json!({"label": label, "tensors": tensors, "collectives": collectives}))
    });
    Value::Array(cases.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Case;

    #[test]
    fn nothing_that_a_case_says_becomes_markup() {
        let evil = "</script><img src=x onerror='a()'>\"&";
        let row = |label: &str, report| CaseResult {
            case: Case::default(),
            label: label.into(),
            precision: None,
            report,
            measured: Some(0.02),
            error: Some(evil.into()),
            compiler: None,
        };
        let report = json!({
            "target": "cpu:2", "hash": "h", "layout": evil, "mesh": {"context": 2}, "layers": 1,
            "memory": {"arguments": 1, "outputs": 1, "temporaries": 1, "total": 3, "capacity": 9},
            "needed": {"layers": 1, "bytes": 2}, "flops": 1e12, "bytes_accessed": 1e9,
            "chip": {"name": "v5p", "peak": 4e14, "bandwidth": 2e12},
            "collectives": {"per_layer_bytes": 1.0, "per_layer_wire_bytes": 1.0, "per_step_bytes": 1.0,
                "per_step_wire_bytes": 1.0, "list": [{"kind": "all-gather", "scope": evil, "tensor": null, "rule": null,
                "role": null, "reason": evil, "count": 1, "trip_count": 1.0, "per": "layer", "bytes": 1.0,
                "wire_bytes": 1.0, "axes": ["context"], "dtype": "bf16", "overlapped": true, "ms": 0.1}]},
            "predicted_ms": {"compute": 1.0, "memory": 2.0, "collective": 3.0, "step": 4.0},
            "tensors": [{"tensor": evil, "scope": "", "role": "parameter", "dtype": "bf16", "dims": [2], "axes": ["mlp"],
                "sharding": [["context"]], "bytes": 2, "rules": [evil]}],
            "notes": [], "compile_seconds": 1.0, "does_not_fit": null,
        });
        let report = CompileReport::of(&report).expect("figures");
        let rows = vec![row(evil, Some(report)), row("failed", None)];
        let groups = [Group { parts: [evil.into(), String::new(), String::new()], rows }];
        let page = page(evil, &groups);
        assert!(!page.contains("<img"), "{page}");
        assert_eq!(page.matches("</script>").count(), 2);
        for drawn in ["Step time", "Memory per device", "Roofline", "class=\"measured\"", "id=\"tensors\""] {
            assert!(page.contains(drawn), "{drawn}");
        }
        assert!(!page.contains("http"), "nothing is fetched");
        // What the script reads is the case as it is.
        let start = page.find("id=\"data\">").expect("data") + "id=\"data\">".len();
        let end = start + page[start..].find("</script>").expect("its end");
        let data: Value = serde_json::from_str(&page[start..end]).expect("JSON");
        assert_eq!(data[0]["tensors"][0][0], evil);
        assert_eq!(data[0]["tensors"][0][2], "bf16[2{context}]");
    }
}
