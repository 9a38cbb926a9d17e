//! HTML report of an experiment in one self-contained file. The markup contains only the page structure and the
//! headings. The page's script builds the rest from one JSON block and draws plots with Observable Plot (`vendor`).

mod data;
#[cfg(test)]
mod synthetic;

use std::fmt::{Display, Write};

use data::ReportData;

use super::case_result::CaseGroup;

const STYLE: &str = include_str!("page.css");
/// Parts of the page's script. Each may use the parts that precede it.
const SCRIPTS: [&str; 6] = [
    include_str!("script/elements.js"),
    include_str!("script/cases.js"),
    include_str!("script/plots.js"),
    include_str!("script/figures.js"),
    include_str!("script/details.js"),
    include_str!("script/page.js"),
];
const LIBRARIES: [&str; 2] = [include_str!("vendor/d3.min.js"), include_str!("vendor/plot.umd.min.js")];
/// License texts of the libraries. The licenses require that every report contains them.
const LICENSES: &str = include_str!("vendor/LICENSES.txt");
/// Content security policy: the page may not fetch anything.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'";
const HEAD: &str = "<meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
                    <meta name=\"color-scheme\" content=\"light dark\">";
/// Sections of the page that follow the groups.
const BELOW: &str = include_str!("below.html");

/// Returns the HTML page of ranked groups. The page works offline when it is opened as a file.
pub(crate) fn page(title: &str, groups: &[CaseGroup]) -> String {
    let title = escaped(title);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head>{HEAD}<meta http-equiv=\"Content-Security-Policy\" \
         content=\"{POLICY}\"><title>{title}</title><style>{STYLE}</style></head><body>\n<header><h1>{title}</h1>\n"
    );
    if groups.len() > 1 {
        out.push_str("<nav aria-label=\"Groups\"><ul>");
        for (n, group) in groups.iter().enumerate() {
            add(&mut out, format_args!("<li><a href=\"#group-{n}\">{}</a></li>", escaped(&group.name())));
        }
        out.push_str("</ul></nav>\n");
    }
    out.push_str(
        "</header>\n<main>\n<noscript><p>This page requires JavaScript; report.md contains the table.</p></noscript>\n",
    );
    for (n, group) in groups.iter().enumerate() {
        let name = escaped(&group.name());
        let name = if name.is_empty() { "Cases" } else { &name };
        add(&mut out, format_args!("<section class=\"group\" id=\"group-{n}\"><h2>{name}</h2></section>\n"));
    }
    out.push_str(BELOW);
    let data = serde_json::to_string(&ReportData::from_groups(groups))
        .expect("structs of strings and numbers serialize to JSON");
    let data = data.replace('<', "\\u003c");
    add(&mut out, format_args!("</main>\n<script type=\"application/json\" id=\"data\">{data}</script>\n"));
    add(&mut out, format_args!("<script type=\"text/plain\" id=\"licenses\">{LICENSES}</script>\n"));
    for library in LIBRARIES {
        add(&mut out, format_args!("<script>{library}</script>\n"));
    }
    add(
        &mut out,
        format_args!("<script>(() => {{\n\"use strict\";\n{}}})();</script>\n</body></html>\n", SCRIPTS.concat()),
    );
    out
}

fn add(out: &mut String, text: impl Display) {
    // Writing to a string cannot fail.
    let _ = write!(out, "{text}");
}

pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;").replace('\'', "&#39;")
}

#[cfg(test)]
mod tests;
