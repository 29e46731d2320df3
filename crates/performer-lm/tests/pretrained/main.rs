//! Pretrained models: every format on small files that the tests write, against other implementations of the same model; and real
//! models where they are at hand.

mod gguf;
mod gpt2;
mod hugging_face;
mod llama2c;
mod real;
mod support;
