//! `#[needs(…)]`: registers an integration test with its requirements (see `tests/support/harness.rs`).

use proc_macro::{TokenStream, TokenTree};

/// Marks a test function: `#[needs(cpu)]`, `#[needs(cpu, ffmpeg)]`, `#[needs(nothing)]`. The names are the variants of
/// `harness::Need` in snake case.
#[proc_macro_attribute]
pub fn needs(needs: TokenStream, function: TokenStream) -> TokenStream {
    let mut tokens = function.clone().into_iter();
    let is_fn = |token: &TokenTree| matches!(token, TokenTree::Ident(ident) if ident.to_string() == "fn");
    let name = tokens.find(is_fn).and_then(|_| tokens.next());
    let Some(name) = name else {
        return "compile_error!(\"`#[needs(…)]` marks a function\");".parse().expect("a macro call");
    };
    let needs: Vec<String> = needs
        .into_iter()
        .filter(|token| matches!(token, TokenTree::Ident(_)))
        .map(|need| format!("crate::support::harness::Need::{}", capitalized(&need.to_string())))
        .collect();
    let registration = format!(
        "::inventory::submit! {{ crate::support::harness::Test {{
            name: concat!(module_path!(), \"::\", stringify!({name})), needs: &[{}], run: {name} }} }}",
        needs.join(", ")
    );
    let registration: TokenStream = registration.parse().expect("a macro call");
    function.into_iter().chain(registration).collect()
}

/// Converts `four_gpus` to `FourGpus`.
fn capitalized(name: &str) -> String {
    let word = |word: &str| {
        let mut letters = word.chars();
        letters.next().map(|first| first.to_uppercase().chain(letters).collect::<String>()).unwrap_or_default()
    };
    name.split('_').map(word).collect()
}
