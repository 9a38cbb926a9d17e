//! Transformer, connectors and latent upsampler of ltx2's toy model.
//!
//! The files are those of `assets/nano` in the repository.

/// Files of the model: path in the model folder, contents.
pub const FILES: &[(&str, &[u8])] = &[
    ("connectors/config.json", include_bytes!("../model/connectors/config.json")),
    (
        "connectors/diffusion_pytorch_model.safetensors",
        include_bytes!("../model/connectors/diffusion_pytorch_model.safetensors"),
    ),
    ("latent_upsampler/config.json", include_bytes!("../model/latent_upsampler/config.json")),
    (
        "latent_upsampler/diffusion_pytorch_model.safetensors",
        include_bytes!("../model/latent_upsampler/diffusion_pytorch_model.safetensors"),
    ),
    ("transformer/config.json", include_bytes!("../model/transformer/config.json")),
    (
        "transformer/diffusion_pytorch_model.safetensors",
        include_bytes!("../model/transformer/diffusion_pytorch_model.safetensors"),
    ),
];
