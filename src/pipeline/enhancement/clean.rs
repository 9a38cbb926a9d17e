//! Cleaning of a language model's answer, as in Lightricks' pipelines.

/// Replaces typographic quotes, dashes, primes and no-break spaces by ASCII, and removes everything before the first
/// letter, such as markup or the number of a list item. An answer without letters keeps its start.
pub(super) fn clean(answer: &str) -> String {
    let plain: String = answer.chars().map(plain).collect();
    let start = plain.find(char::is_alphabetic).unwrap_or(0);
    plain[start..].trim().into()
}

fn plain(c: char) -> char {
    match c {
        '\u{2018}' | '\u{2019}' | '\u{2032}' => '\'',
        '\u{201c}' | '\u{201d}' => '"',
        '\u{2013}' | '\u{2014}' | '\u{2212}' => '-',
        '\u{a0}' => ' ',
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_cleaned_as_in_the_reference() {
        for (answer, cleaned) in [
            ("**Hi \u{2014} \u{201c}a\u{201d}", "Hi - \"a\""),
            ("1. one\n", "one"),
            ("123", "123"),
            ("É\u{2019}t\u{a0}\u{2032}\u{2212}\u{2013}", "É't '--"),
            ("  ", ""),
        ] {
            assert_eq!(clean(answer), cleaned, "{answer}");
        }
    }
}
