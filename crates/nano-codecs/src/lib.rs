//! Text encoder, VAEs, vocoder, tokenizer and scheduler of ltx2's toy model.
//!
//! The files are those of `assets/nano` in the repository.

/// Files of the model: path in the model folder, contents.
pub const FILES: &[(&str, &[u8])] = &[
    ("audio_vae/config.json", include_bytes!("../model/audio_vae/config.json")),
    (
        "audio_vae/diffusion_pytorch_model.safetensors",
        include_bytes!("../model/audio_vae/diffusion_pytorch_model.safetensors"),
    ),
    ("model_index.json", include_bytes!("../model/model_index.json")),
    ("scheduler/scheduler_config.json", include_bytes!("../model/scheduler/scheduler_config.json")),
    ("text_encoder/config.json", include_bytes!("../model/text_encoder/config.json")),
    ("text_encoder/model.safetensors", include_bytes!("../model/text_encoder/model.safetensors")),
    ("tokenizer/tokenizer.json", include_bytes!("../model/tokenizer/tokenizer.json")),
    ("tokenizer/tokenizer_config.json", include_bytes!("../model/tokenizer/tokenizer_config.json")),
    ("vae/config.json", include_bytes!("../model/vae/config.json")),
    ("vae/diffusion_pytorch_model.safetensors", include_bytes!("../model/vae/diffusion_pytorch_model.safetensors")),
    ("vocoder/config.json", include_bytes!("../model/vocoder/config.json")),
    (
        "vocoder/diffusion_pytorch_model.safetensors",
        include_bytes!("../model/vocoder/diffusion_pytorch_model.safetensors"),
    ),
];
