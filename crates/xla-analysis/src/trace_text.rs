//! Formats the summary of a trace as tables.

use std::fmt;

use super::trace::{CategoryTime, Trace};

/// Number of name scopes in the table. The JSON summary has all of them.
const SCOPES: usize = 30;

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.steps.unwrap_or(1).max(1) as f64;
        let (unit, of) = match self.steps {
            Some(n) => ("ms a step", format!("{n} step(s), ")),
            None => ("ms", String::new()),
        };
        writeln!(f, "{of}{} device(s), {:.3} ms", self.devices.len(), self.window_ms)?;
        writeln!(f, "{:<24}{unit:>12}{:>9}{:>12}{:>12}", "", "share", "exposed", "overlapped")?;
        let row = |f: &mut fmt::Formatter<'_>, name: &str, ms: f64, share: f64| {
            write!(f, "{name:<24}{:>12.3}{:>7.1} %", ms / steps, share * 100.0)
        };
        for CategoryTime { category, ms, share, exposed_ms, overlapped_ms, .. } in &self.categories {
            row(f, category.name(), *ms, *share)?;
            for part in [exposed_ms, overlapped_ms].into_iter().flatten() {
                write!(f, "{:>12.3}", part / steps)?;
            }
            writeln!(f)?;
        }
        row(f, "idle", self.idle_ms, self.idle_share)?;
        writeln!(f, "\n")?;
        writeln!(f, "{unit:>12}{:>9}   {:<20}name scope", "share", "main category")?;
        for s in self.scopes.iter().take(SCOPES) {
            let most =
                s.categories.iter().max_by(|a, b| a.1.total_cmp(b.1)).map_or("", |(category, _)| category.name());
            let name = if s.scope.is_empty() { "(none)" } else { &s.scope };
            writeln!(f, "{:>12.3}{:>7.1} %   {most:<20}{name}", s.ms / steps, s.share * 100.0)?;
        }
        if self.scopes.len() > SCOPES {
            writeln!(f, "and {} more", self.scopes.len() - SCOPES)?;
        }
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        Ok(())
    }
}
