//! Cleaning of a language model's answer: as in Lightricks' pipelines, and without its reasoning.

/// End of the reasoning of models that write it into their answers.
const END_OF_REASONING: &str = "</think>";

/// Removes the reasoning, that is, everything up to the last `</think>`. Replaces typographic quotes, dashes, primes and
/// no-break spaces by ASCII. Then removes everything before the first letter, such as markup or a list number; text
/// without letters is only trimmed.
pub(super) fn clean(answer: &str) -> String {
    let answer = answer.rsplit_once(END_OF_REASONING).map_or(answer, |(_, answer)| answer);
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
    fn answers_lose_reasoning_and_typographic_characters() {
        for (answer, cleaned) in [
            ("**Hi \u{2014} \u{201c}a\u{201d}", "Hi - \"a\""),
            ("1. one\n", "one"),
            ("123", "123"),
            ("É\u{2019}t\u{a0}\u{2032}\u{2212}\u{2013}", "É't '--"),
            ("  ", ""),
            ("<think>A dog?\n</think> No.</think>\n\n**A fox.", "A fox."),
            ("<think>A dog?</think>\n", ""),
        ] {
            assert_eq!(clean(answer), cleaned, "{answer}");
        }
    }
}
