//! Recognizes common files that are not safetensors or JSON, and suggests remedies.

/// Number of leading bytes needed for detection.
pub const SIGNATURE_BYTES: usize = 512;

/// Signatures (leading bytes) of files that are neither safetensors nor JSON.
const SIGNATURES: [(&[u8], &str); 10] = [
    (b"GGUF", "a GGUF file, which holds weights only; it can be the transformer or the text encoder"),
    (
        b"version https://git-lfs",
        "a git-LFS pointer instead of the file itself; run `git lfs pull` in its repository, or download it with `ltx2 pull`",
    ),
    (b"PK\x03\x04", PICKLED),
    (b"\x80\x02", PICKLED),
    (b"\x80\x03", PICKLED),
    (b"\x80\x04", PICKLED),
    (b"\x80\x05", PICKLED),
    (b"\x1f\x8b", PACKED),
    (b"\x28\xb5\x2f\xfd", PACKED),
    (b"7z\xbc\xaf\x27\x1c", PACKED),
];

const PICKLED: &str = "a zip archive or pickle written by torch.save, which is not supported; convert it with safetensors.torch.save_file";
const PACKED: &str = "a compressed archive; extract it first";
const PAGE: &str = "an HTML page, such as a login or error page, instead of the file itself; download it again";
const JSON: &str = "JSON; use the safetensors file, or the folder that contains both";
const ZEROS: &str = "a file that begins with zeros, probably an incomplete download; download it again";

/// Detects a format other than safetensors from the first bytes of a file. Returns a description of the format and a
/// remedy; `None` if no other format is recognized.
pub fn non_safetensors_kind(start: &[u8]) -> Option<&'static str> {
    let text = start.trim_ascii_start();
    match text.first() {
        Some(b'{' | b'[') => Some(JSON),
        _ if start.len() >= 8 && start.iter().all(|byte| *byte == 0) => Some(ZEROS),
        _ => non_json_kind(start),
    }
}

/// Detects a format other than JSON from the first bytes of a file. Returns a description of the format and a remedy;
/// `None` if no other format is recognized.
pub fn non_json_kind(start: &[u8]) -> Option<&'static str> {
    if let Some((_, kind)) = SIGNATURES.iter().find(|(beginning, _)| start.starts_with(beginning)) {
        return Some(kind);
    }
    let text = start.trim_ascii_start();
    let is_page = |tag: &str| text.get(..tag.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(tag.as_bytes()));
    (is_page("<!doctype") || is_page("<html") || is_page("<?xml")).then_some(PAGE)
}
