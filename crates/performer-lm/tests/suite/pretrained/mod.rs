//! These tests open pretrained models: every format on small files that the tests write, compared
//! with other implementations of the same model, and real models if they are available.

mod gguf;
mod gpt2;
mod hugging_face;
mod llama2c;
mod real;
mod support;
