//! Diagnoses the fastest case of each group of an experiment.

use super::case_result::{CaseGroup, CaseResult, GroupDiagnosis};
use super::diagnose::{BUDGET, DiagnoseRequest, MIN_GAIN, diagnose};
use super::diagnosis_text::{diagnosis_text, suggestion_lines};
use super::error::{Result, TuneError};
use super::experiment::{case_overrides, settings};
use super::options::TuneOptions;
use super::table::escaped_line;
use crate::config::{Case, ConfigError, Experiment};
use crate::pipeline::programs::build::ProgramKind;

/// Diagnoses the fastest case of each group that fits into device memory, using the experiment's modules. Writes
/// results and layout files to the subfolder `why`, because the experiment's own results file is locked. A diagnosis
/// that fails is a result, not an error.
pub(crate) fn diagnose_groups(groups: &mut [CaseGroup], file: &Experiment, options: &TuneOptions) -> Result<()> {
    let modules = options.modules.clone().unwrap_or_else(|| options.folder.join("modules"));
    let options =
        TuneOptions { folder: options.folder.join("why"), modules: Some(modules), measure: false, ..options.clone() };
    for group in groups {
        let Some(fastest) = group.fastest() else { continue };
        let label = fastest.label.clone();
        tracing::info!("diagnosing {} {label}", group.name());
        let result = match request(fastest, file, &options).and_then(|request| diagnose(&request, &options)) {
            Err(e @ (TuneError::File { .. } | TuneError::Busy(_) | TuneError::Modules(_))) => return Err(e),
            result => result.map_err(|e| e.to_string()),
        };
        group.diagnosis = Some(GroupDiagnosis { label, result });
    }
    Ok(())
}

/// Returns the diagnosis request for a case: its configuration, and the arguments that give a child process the same
/// configuration except for the layout.
fn request(row: &CaseResult, file: &Experiment, options: &TuneOptions) -> Result<DiagnoseRequest> {
    let mut arguments = options.chip_arguments();
    arguments.extend(settings(&Case { layout: None, ..row.case.clone() }, file)?);
    Ok(DiagnoseRequest {
        given: case_overrides(&row.case, file)?,
        settings: arguments,
        target: row.case.target.clone().expect("files with a case that has no target are rejected"),
        chip: options.chip.as_ref().map(|(_, chip)| chip.clone()),
        program: ProgramKind::named(&file.program).map_err(ConfigError::argument)?,
        layers: row.report.as_ref().expect("a case that fits has a report").layers,
        collective: None,
        budget: BUDGET,
        timeout: file.timeout,
    })
}

/// Formats the diagnoses of all groups as text.
pub(crate) fn group_diagnosis_text(groups: &[CaseGroup]) -> String {
    let text = |group: &CaseGroup| {
        let diagnosed = group.diagnosis.as_ref()?;
        let said = match &diagnosed.result {
            Ok(diagnosis) => diagnosis_text(diagnosis, None),
            Err(why) => format!("diagnosis failed: {why}\n"),
        };
        Some(format!("\n{}\n{said}", group.name_of(&diagnosed.label)))
    };
    groups.iter().filter_map(text).collect()
}

/// Formats the suggestions as sections of the Markdown page.
pub(crate) fn suggestions_markdown(groups: &[CaseGroup]) -> String {
    groups.iter().map(suggestions).collect()
}

fn suggestions(group: &CaseGroup) -> String {
    let Some(diagnosed) = &group.diagnosis else { return String::new() };
    let lines = match &diagnosed.result {
        Ok(diagnosis) => suggestion_lines(diagnosis),
        Err(why) => vec![format!("diagnosis failed: {why}")],
    };
    let none = || vec![format!("no change of a single rule shortens the step by {:.0} % or more", MIN_GAIN * 100.0)];
    let lines = if lines.is_empty() { none() } else { lines };
    let list: String = lines.iter().map(|line| format!("- {}\n", escaped_line(line))).collect();
    format!("\n## Suggestions: {}\n\n{list}", escaped_line(&group.name_of(&diagnosed.label)))
}
