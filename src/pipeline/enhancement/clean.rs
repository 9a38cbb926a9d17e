//! Cleaning of a language model's answer: as in Lightricks' pipelines, and without its reasoning.

/// Start and end of the reasoning of models that write it into their answers.
const REASONING: [[&str; 2]; 2] = [["<think>", "</think>"], ["<|channel>", "<channel|>"]];

/// Returns the part of an answer after its reasoning. `None`: the answer was cut off in its reasoning.
pub(super) fn after_reasoning(answer: &str) -> Option<&str> {
    REASONING.iter().try_fold(answer, |rest, [start, end]| {
        let rest = rest.rsplit_once(end).map_or(rest, |(_, rest)| rest);
        (!rest.contains(start)).then_some(rest)
    })
}

/// Same as [`after_reasoning`] for tokens. `start`, `end`: tokens around the reasoning, if the model has them.
pub(super) fn tokens_after_reasoning(answer: &[i32], start: Option<i32>, end: Option<i32>) -> Option<&[i32]> {
    let rest = &answer[answer.iter().rposition(|id| Some(*id) == end).map_or(0, |at| at + 1)..];
    (!rest.iter().any(|id| Some(*id) == start)).then_some(rest)
}

/// Cleans the part of an answer after its reasoning. Replaces typographic quotes, dashes, primes and
/// no-break spaces by ASCII. Then removes everything before the first letter, such as markup or a list number; text
/// without letters is only trimmed.
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
    fn answers_lose_reasoning_and_typographic_characters() {
        for (answer, cleaned) in [
            ("**Hi \u{2014} \u{201c}a\u{201d}", "Hi - \"a\""),
            ("1. one\n", "one"),
            ("123", "123"),
            ("É\u{2019}t\u{a0}\u{2032}\u{2212}\u{2013}", "É't '--"),
            ("  ", ""),
            ("<think>A dog?\n</think> No.</think>\n\n**A fox.", "A fox."),
            ("<think>A dog?</think>\n", ""),
            ("<|channel>thought\nA dog?<channel|>A fox.", "A fox."),
        ] {
            assert_eq!(after_reasoning(answer).map(clean).as_deref(), Some(cleaned), "{answer}");
        }
    }

    #[test]
    fn answer_that_ends_in_its_reasoning_is_no_prompt() {
        for answer in ["<think>A dog?", "<think>A</think>\n<think>B", "<|channel>thought\nA dog?", "A<|channel>"] {
            assert_eq!(after_reasoning(answer), None, "{answer}");
        }
        let rest = |answer: &'static [i32]| tokens_after_reasoning(answer, Some(7), Some(8));
        assert_eq!(rest(&[7, 1, 8, 2, 3]), Some(&[2, 3][..]));
        assert_eq!([rest(&[7, 1]), rest(&[7, 1, 8, 7, 2])], [None, None]);
        assert_eq!(tokens_after_reasoning(&[7, 1], None, None), Some(&[7, 1][..]));
    }
}
