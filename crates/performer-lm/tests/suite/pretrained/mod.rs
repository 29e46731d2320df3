//! These tests open pretrained models: every format on small files that the tests write, compared
//! with other implementations of the same model, and real models if they are available.

pub(crate) mod gguf;
pub(crate) mod gpt2;
mod hugging_face;
pub(crate) mod llama2c;
mod real;
pub(crate) mod support;
