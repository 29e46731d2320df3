//! These tests check the decoder's gradients and what training makes of them: every parameter of
//! every variant gets one, the tape's are Candle's, and a teacher's share of the loss is its share.

use anyhow::Result;
use candle_core::{D, Device, Tensor};
use performer_core::{Tape, ops};
use performer_lm::{
    config::{AttentionConfig, FeedForwardKind, ModelConfig, NormKind, Positions, Preset},
    model::{Decoder, Dropout},
};

use super::{base, ids, tensor, variants};

#[test]
fn every_parameter_of_every_variant_gets_a_gradient() -> Result<()> {
    let hybrid = "favor:m=24,gate+softmax/2";
    for attention in [
        "softmax",
        "favor:m=24",
        "favor:m=16,map=relu",
        "favor:m=24,gate",
        "softmax:gate",
        "softmax:conv",
        hybrid,
        "favor:m=24,gate,conv,output-gate,output-norm",
        "favor:map=taylor2,gate,conv,output-gate,output-norm,key-dim=4",
        "favor:m=24,key-dim=4+softmax:conv,key-dim=12/2",
    ] {
        for config in variants(attention) {
            let model = Decoder::new(&config, 1, &Device::Cpu)?;
            let loss = model.losses(&tensor(&ids(2, 40, 0), 2)?, &ids(2, 40, 1), None)?.mean_all()?;
            let gradients = loss.backward()?;
            for (name, var) in model.named_parameters() {
                let Some(gradient) = gradients.get(&var) else { panic!("{name} has no gradient in {config:?}") };
                let size = gradient.abs()?.sum_all()?.to_scalar::<f32>()?;
                // A key bias adds one constant to all logits of a row, on which softmax does not
                // depend, so what is left is rounding. Polynomial features are softmax up to the
                // third power of the logits, which are small at the start.
                let nearly_softmax = attention.contains("softmax") || attention.contains("taylor2");
                let unseen = nearly_softmax && name.ends_with("k_proj.bias");
                assert!(size.is_finite() && (size > 1e-9 || unseen), "{name} has gradient {size} in {config:?}");
            }
        }
    }
    Ok(())
}

/// The gradients that training uses are a tape's, and those of Candle's backward pass.
#[test]
fn gradients_of_training_are_candles() -> Result<()> {
    let (x, targets) = (tensor(&ids(2, 12, 0), 2)?, ids(2, 12, 1));
    let count = targets.len() as f64;
    for attention in ["softmax", "favor:m=16,gate,conv,output-gate,output-norm"] {
        for config in variants(attention) {
            let model = Decoder::new(&config, 4, &Device::Cpu)?;
            let want = model.losses(&x, &targets, None)?.mean_all()?.backward()?;
            let tape = Tape::start();
            let loss = ops::scale(&ops::sum_all(&model.losses(&x, &targets, None)?)?, 1.0 / count)?;
            assert_eq!(tape.unrecorded(&loss), 0);
            let got = tape.backward(&loss)?;
            for (name, parameter) in model.named_parameters() {
                let numbers = |store: &candle_core::backprop::GradStore| -> Result<Vec<f32>> {
                    Ok(store.get(&parameter).expect("a gradient").flatten_all()?.to_vec1()?)
                };
                let (want, got) = (numbers(&want)?, numbers(&got)?);
                let largest = want.iter().fold(0f32, |most, x| most.max(x.abs()));
                let worst = want.iter().zip(&got).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
                assert!(worst <= 1e-5 * largest, "{config:?}: {name} differs by {worst} of {largest}");
            }
        }
    }
    Ok(())
}

/// The teacher's share of the loss is its share, and its distribution is what counts.
#[test]
fn distillation_mixes_the_teacher_with_the_next_token() -> Result<()> {
    let student = Decoder::new(&base("favor:m=16"), 1, &Device::Cpu)?;
    let teacher = Decoder::new(&base("softmax"), 2, &Device::Cpu)?;
    let (x, targets) = (tensor(&ids(2, 12, 0), 2)?, ids(2, 12, 1));
    let losses =
        |share| -> Result<Vec<f32>> { Ok(student.distillation_losses(&x, &targets, &teacher, share)?.to_vec1()?) };
    let (hard, soft, mixed) = (losses(0.0)?, losses(1.0)?, losses(0.25)?);
    let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5 * (1.0 + b.abs()));
    assert!(close(&hard, &student.losses(&x, &targets, None)?.to_vec1()?));
    let expected: Vec<f32> = hard.iter().zip(&soft).map(|(hard, soft)| 0.75 * hard + 0.25 * soft).collect();
    assert!(close(&mixed, &expected), "{mixed:?} and {expected:?}");
    let logits = |model: &Decoder| -> Result<Tensor> { Ok(model.forward(&x, None)?.flatten(0, 1)?) };
    let theirs = candle_nn::ops::softmax(&logits(&teacher)?, D::Minus1)?;
    let ours = candle_nn::ops::log_softmax(&logits(&student)?, D::Minus1)?;
    let expected: Vec<f32> = (theirs * ours)?.sum(D::Minus1)?.neg()?.to_vec1()?;
    assert!(close(&soft, &expected), "{soft:?} and {expected:?}");
    assert!(!close(&hard, &soft));
    let gradients = student.distillation_losses(&x, &targets, &teacher, 0.5)?.mean_all()?.backward()?;
    assert!(teacher.named_parameters().iter().all(|(_, parameter)| gradients.get(parameter).is_none()));
    Ok(())
}

/// Candle adds the gradient of every edge of the graph to zeros, so that every further node of a
/// block costs a training step a pass or more over a tensor of the size of the activations. A block
/// of Llama's kind has a node for each of: two norms, queries, keys, values, attention, its output
/// with the residual, gates and their product, the layer's output with the residual; and one for
/// each of its nine weights.
#[test]
fn a_block_is_few_nodes_of_the_graph() -> Result<()> {
    for attention in ["softmax", "favor:m=24"] {
        let nodes = |layers| -> Result<usize> {
            let config = ModelConfig {
                layers,
                feed_forward: FeedForwardKind::Swiglu,
                norm: NormKind::RmsNorm,
                positions: Positions::Rotary { base: 10_000.0 },
                bias: false,
                ..base(attention)
            };
            let model = Decoder::new(&config, 1, &Device::Cpu)?;
            let losses = model.losses(&Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?, &[2, 3, 4], None)?;
            Ok(losses.sorted_nodes().len())
        };
        assert_eq!(nodes(3)? - nodes(2)?, 9 + 9, "{attention}");
    }
    Ok(())
}

/// The backward pass of training is a tape's: no operation in between makes it Candle's, which adds
/// every gradient to zeros.
#[test]
fn training_is_made_of_operations_that_a_tape_records() -> Result<()> {
    for preset in [Preset::Seed, Preset::Small, Preset::Code, Preset::Stories15m] {
        for attention in [
            "softmax",
            "softmax:window=8",
            "favor:m=16",
            "favor:m=16,map=learned",
            "softmax:gate",
            "softmax:window=8,gate",
            "favor:m=16,gate",
            "favor:m=16,map=learned,gate",
            "softmax:conv",
            "softmax:window=8,gate,conv,output-gate,output-norm",
            "favor:m=16,gate,conv,output-gate,output-norm",
            "favor:m=16,window=8",
            "favor:m=16,map=learned,window=8",
            "favor:m=16,map=learned,window=8,gate",
            "uniform:gate",
        ] {
            let attention: AttentionConfig = attention.parse().map_err(anyhow::Error::msg)?;
            let (config, _) = preset.load()?;
            let exact = ModelConfig { feed_forward: FeedForwardKind::GeluExact, ..config.clone() };
            for config in [config, exact] {
                let config = ModelConfig { attention: attention.clone(), vocab_size: 300, layers: 2, ..config };
                let model = Decoder::new(&config, 1, &Device::Cpu)?;
                let ids = Tensor::arange(0, 64u32, &Device::Cpu)?.reshape((2, 32))?;
                for dropout in [None, Some(Dropout::new(0.1, 1))] {
                    let tape = Tape::start();
                    let losses = model.losses(&ids, &(1..65).collect::<Vec<u32>>(), dropout.as_ref())?;
                    let unrecorded = tape.unrecorded(&ops::sum_all(&losses)?);
                    assert_eq!(unrecorded, 0, "{preset:?} {} {:?}", config.attention, config.feed_forward);
                }
            }
        }
    }
    Ok(())
}
