//! Files that are something else than what their names say: what each is, and what to do about it.

/// Number of bytes at the beginning of a file that tell.
pub(crate) const TELLING: usize = 512;

/// Beginnings of files that are neither safetensors nor JSON.
const BEGINNINGS: [(&[u8], &str); 10] = [
    (b"GGUF", "a GGUF file, which is not read; use the bf16 or fp8 safetensors file of the same model"),
    (
        b"version https://git-lfs",
        "a git-LFS pointer in place of the file; run `git lfs pull` in its repository, or download it with `hf download`",
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

const PICKLED: &str = "a zip archive or a pickle, as torch.save writes it, which is not read; save its tensors with safetensors.torch.save_file";
const PACKED: &str = "a packed archive; unpack it first";
const PAGE: &str = "an HTML page, such as that of a login or an error, in place of the file; download it again";
const JSON: &str = "JSON; give the safetensors file, or the folder that holds both";
const ZEROS: &str = "nothing but zeros at its beginning, as unfinished downloads have; download it again";

/// What a file that is read as safetensors is by its first bytes, where that is known, with what to do about it.
pub(crate) fn kind(start: &[u8]) -> Option<&'static str> {
    let text = start.trim_ascii_start();
    match text.first() {
        Some(b'{' | b'[') => Some(JSON),
        _ if start.len() >= 8 && start.iter().all(|byte| *byte == 0) => Some(ZEROS),
        _ => kind_beside_json(start),
    }
}

/// What a file that is read as JSON is by its first bytes, where that is known, with what to do about it.
pub(crate) fn kind_beside_json(start: &[u8]) -> Option<&'static str> {
    if let Some((_, kind)) = BEGINNINGS.iter().find(|(beginning, _)| start.starts_with(beginning)) {
        return Some(kind);
    }
    let text = start.trim_ascii_start();
    let is_page = |tag: &str| text.get(..tag.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(tag.as_bytes()));
    (is_page("<!doctype") || is_page("<html") || is_page("<?xml")).then_some(PAGE)
}
