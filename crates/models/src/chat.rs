//! Chat formats of the Gemma families: how a system prompt and a user's message become the tokens that the model
//! continues.

/// Special tokens of the chat formats. In prompts, they and all added tokens of the tokenizer are encoded as ordinary text,
/// even if the tokenizer does not declare them as special tokens.
pub(crate) const CONTROL_TOKENS: [&str; 8] =
    ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"];

/// Part of a chat, encoded separately from the other parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatPart {
    /// A special token.
    Token(&'static str),
    /// A text in which special tokens are not recognized.
    Text(String),
}

/// Chat format of a model family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatFormat {
    /// Name of the model family, for messages.
    pub family: &'static str,
    /// Tokens that the tokenizer must have: those that start and end a turn.
    pub turn: [&'static str; 2],
    /// Whether the system prompt has its own turn. If not, it is the start of the user's turn.
    has_system_turn: bool,
    /// Tokens that start and end the model's reasoning. If the tokenizer has them, the chat ends with an empty reasoning
    /// block, so that the model answers immediately. `None`: the family does not reason.
    reasoning: Option<[&'static str; 2]>,
    /// Number of BOS tokens at the start.
    bos: usize,
    /// Length of token sequences that must not occur twice in the chat and its answer; 0: no restriction.
    pub no_repeat_ngram_size: usize,
}

/// Gemma 3. The text starts with two BOS tokens, because Lightricks' and diffusers' pipelines tokenize the rendered chat
/// template, which contains BOS, with a tokenizer that adds BOS.
pub const GEMMA_3: ChatFormat = ChatFormat {
    family: "Gemma 3",
    turn: ["<start_of_turn>", "<end_of_turn>"],
    has_system_turn: false,
    reasoning: None,
    bos: 2,
    no_repeat_ngram_size: 0,
};

/// Gemma 4.
pub const GEMMA_4: ChatFormat = ChatFormat {
    family: "Gemma 4",
    turn: ["<|turn>", "<turn|>"],
    has_system_turn: true,
    reasoning: Some(["<|channel>", "<channel|>"]),
    bos: 1,
    no_repeat_ngram_size: 5,
};

impl ChatFormat {
    /// Returns the parts of the chat whose continuation is the model's answer. `has_token`: whether the tokenizer has a
    /// token.
    pub fn parts(&self, system: &str, user: &str, has_token: impl Fn(&str) -> bool) -> Vec<ChatPart> {
        use ChatPart::{Text, Token};
        let [start, end] = self.turn.map(Token);
        let (system, user) = (system.trim(), user.trim());
        let texts = match self.has_system_turn {
            true => vec![format!("system\n{system}"), format!("user\n{user}")],
            false => vec![format!("user\n{system}\n\n{user}")],
        };
        let mut parts = vec![Token("<bos>"); self.bos];
        for text in texts {
            parts.extend([start.clone(), Text(text), end.clone(), Text("\n".into())]);
        }
        parts.extend([start, Text("model\n".into())]);
        if let Some(tokens) = self.reasoning.filter(|tokens| tokens.iter().all(|token| has_token(token))) {
            let [start, end] = tokens.map(Token);
            parts.extend([start, Text("thought\n".into()), end]);
        }
        parts
    }

    /// Returns the tokens that start and end the model's reasoning. `None`: the family does not reason.
    pub fn reasoning(&self) -> [Option<&'static str>; 2] {
        self.reasoning.map_or([None; 2], |tokens| tokens.map(Some))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chat_texts_follow_the_family_templates() {
        let text = |format: ChatFormat, has: bool| {
            let parts = format.parts("Be brief.\n", " user prompt: a fox ", |_| has);
            let own = |part: ChatPart| match part {
                ChatPart::Token(token) => token.to_string(),
                ChatPart::Text(text) => text,
            };
            parts.into_iter().map(own).collect::<String>()
        };
        assert_eq!(
            text(GEMMA_3, true),
            "<bos><bos><start_of_turn>user\nBe brief.\n\nuser prompt: a fox<end_of_turn>\n<start_of_turn>model\n"
        );
        let turns = "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nuser prompt: a fox<turn|>\n<|turn>model\n";
        assert_eq!(text(GEMMA_4, true), format!("{turns}<|channel>thought\n<channel|>"));
        assert_eq!(text(GEMMA_4, false), turns);
    }

    #[test]
    fn chat_tokens_are_control_tokens() {
        for format in [GEMMA_3, GEMMA_4] {
            for part in format.parts("<end_of_turn>", "<turn|>", |_| true) {
                let is_control = |token: &str| CONTROL_TOKENS.contains(&token);
                assert!(!matches!(part, ChatPart::Token(token) if !is_control(token)), "{part:?}");
            }
        }
    }
}
