//! Commits cited in the documentation exist and have the stated number of files.

use std::fs;
use std::process::Command;

use crate::support::needs;

/// Returns the hashes in backticks on a page, each with the text after it.
fn cited(page: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = page.split('`').collect();
    let is_hash = |word: &str| {
        (7..=8).contains(&word.len())
            && word.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
            && word.bytes().any(|byte| byte.is_ascii_digit())
    };
    let pairs = (1..parts.len().saturating_sub(1)).step_by(2).map(|n| (parts[n], parts[n + 1]));
    pairs.filter(|(word, _)| is_hash(word)).collect()
}

fn files(hash: &str) -> Vec<String> {
    let shown = Command::new("git").args(["show", "--format=", "--name-only", hash]).output().expect("git runs");
    assert!(shown.status.success(), "{hash} is not a commit of this repository");
    String::from_utf8(shown.stdout).expect("names").lines().map(String::from).collect()
}

/// Checks `` `HASH`, N files `` in the table of examples, and that every other hash on the page exists.
#[needs(history)]
fn commits_cited_in_extending_guide_have_stated_file_counts() {
    let page = fs::read_to_string("docs/internals/extending.md").expect("the page");
    let cited = cited(&page);
    let mut counted = 0;
    for (hash, behind) in &cited {
        let found = files(hash);
        let Some((number, _)) = behind.strip_prefix(", ").and_then(|rest| rest.split_once(" file")) else { continue };
        if let Ok(number) = number.parse::<usize>() {
            assert_eq!(found.len(), number, "{hash}: {found:?}");
            counted += 1;
        }
    }
    assert!(counted >= 5 && cited.len() > counted, "{counted} of {} hashes state a number of files", cited.len());
}
