//! This module tells the user which layers of a model have attention without a fused kernel.

use anyhow::Result;
use performer_core::Path;

use super::output;
use crate::model::Decoder;

/// Says once which layers have no fused kernel, and why.
pub(super) fn warn(model: &Decoder, training: bool) -> Result<()> {
    if let Some(text) = text(&model.paths(training)?) {
        output::note(&text);
    }
    Ok(())
}

/// Returns a note on the layers that are not fused, with the reason of the first of them, or `None`
/// where all are fused.
fn text(paths: &[Path]) -> Option<String> {
    let slow: Vec<usize> = (0..paths.len()).filter(|&layer| !paths[layer].is_fused()).collect();
    let first = slow.first()?;
    let layers = match slow.len() {
        all if all == paths.len() => "all layers".into(),
        1 => format!("layer {first}"),
        count => format!("{count} of {} layers, from layer {first} on", paths.len()),
    };
    Some(format!("note: attention is slow in {layers}: {}", paths[*first]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_layers_are_named_with_the_reason() {
        let fused = || Path::Fused { device: "CPU" };
        assert_eq!(text(&[fused(), fused()]), None);
        let softmax = performer_core::Softmax::new().composed();
        let x = candle_core::Tensor::zeros((1, 1, 2, 4), candle_core::DType::F32, &candle_core::Device::Cpu).unwrap();
        let inputs = performer_core::Inputs::new(&x, &x, &x);
        let slow = || performer_core::Attention::path(&softmax, inputs, &performer_core::Mask::causal()).unwrap();
        let said = text(&[fused(), slow(), slow()]).unwrap();
        assert_eq!(
            said,
            "note: attention is slow in 2 of 3 layers, from layer 1 on: composed operations, since it was asked for"
        );
        assert!(text(&[slow()]).unwrap().contains("all layers"));
    }
}
