//! These tests check conversions to students with parts that the teacher has not: gates, filters
//! and output gates begin as nothing, get a pace, and are trained beside adapters.

use super::*;

/// With adapters, what the teacher does not have is trained beside them: gates, filters, output
/// gates and features.
#[test]
fn adapters_leave_new_parts_to_be_trained() -> Result<()> {
    let (data, folder, stop) = (data()?, tempfile::tempdir()?, AtomicBool::new(false));
    let teacher = teacher(&data)?;
    let plan = plan(&teacher, "favor:m=8,map=learned,gate,conv,output-gate", folder.path(), &stop);
    let weights = || Pretrained::open(&folder.path().to_string_lossy()).map(|model| model.tensors);
    let untuned = Plan { transfer_steps: 0, tuning: None, ..tuned(plan, |_| ()) };
    convert(&untuned, &data)?;
    let before = weights()?;
    let plan = self::plan(&teacher, "favor:m=8,map=learned,gate,conv,output-gate", folder.path(), &stop);
    convert(&Plan { transfer_steps: 0, ..tuned(plan, |tuning| tuning.adapters = Some(2)) }, &data)?;
    let after = weights()?;
    let numbers = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
    for part in ["gate.weight", "gate.bias", "q_conv1d.weight", "output_gate.weight", "feature_map.keys"] {
        let name = format!("model.layers.0.self_attn.{part}");
        let (before, after) = (before.get(&name).context(name.clone())?, after.get(&name).context(name.clone())?);
        assert_ne!(numbers(before)?, numbers(after)?, "{name}");
    }
    let norm = "model.layers.0.input_layernorm.weight";
    assert_eq!(numbers(&before[norm])?, numbers(&after[norm])?);
    // What the adapters learned is merged into the weights, and has their rank.
    for name in ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"] {
        let name = format!("model.layers.0.{name}.weight");
        let change = (&after[&name] - &before[&name])?.to_vec2::<f32>()?;
        assert_eq!(rank(change), 2, "{name}");
    }
    Ok(())
}

/// The rank of a matrix, by elimination; what is below a thousandth of the largest number counts as
/// zero. A matrix of zeros has rank 0.
fn rank(mut rows: Vec<Vec<f32>>) -> usize {
    let largest = |rows: &[Vec<f32>]| rows.iter().flatten().fold(0f32, |most, x| most.max(x.abs()));
    let limit = 1e-3 * largest(&rows);
    let mut rank = 0;
    while largest(&rows) > limit {
        let places = rows.iter().enumerate().flat_map(|(i, row)| row.iter().enumerate().map(move |(j, &x)| (i, j, x)));
        let Some((i, j, pivot)) = places.max_by(|a, b| a.2.abs().total_cmp(&b.2.abs())) else { break };
        let with_pivot = rows.swap_remove(i);
        for row in &mut rows {
            let factor = row[j] / pivot;
            row.iter_mut().zip(&with_pivot).for_each(|(x, y)| *x -= factor * y);
        }
        rank += 1;
    }
    rank
}

/// Convolutions and output gates begin without effect, and learn in the last stage.
#[test]
fn a_student_may_have_parts_that_change_nothing_at_first() -> Result<()> {
    let (data, stop) = (data()?, AtomicBool::new(false));
    let teacher = teacher(&data)?;
    let (plain, equipped) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let of = |attention: &str, folder: &Path| convert(&plan(&teacher, attention, folder, &stop), &data);
    let without = of("favor:m=8,map=learned,window=4", plain.path())?;
    let with = of("favor:m=8,map=learned,window=4,conv,output-gate", equipped.path())?;
    let measured =
        |report: &Report, i: usize| (report.stages[i].measured.clone(), report.stages[i].without_window.clone());
    for i in 0..4 {
        assert_eq!(measured(&with, i), measured(&without, i), "{}", with.stages[i].name);
    }
    assert!(with.stages[1].without_window.as_ref().is_some_and(|bare| *bare != with.stages[1].measured));
    assert_ne!(measured(&with, 4), measured(&without, 4));
    let saved = Pretrained::open(&equipped.path().to_string_lossy())?;
    let filters = saved.tensors["model.layers.0.self_attn.k_conv1d.weight"].to_vec2::<f32>()?;
    assert!(filters.iter().all(|filter| filter[3] > 0.9) && filters.iter().any(|filter| filter[0] != 0.0));
    Ok(())
}

/// Forget gates begin with hardly any effect, get a pace of each head from calibration, and learn
/// in the transfer, which leaves everything else but the features as it was.
#[test]
fn a_student_may_have_forget_gates() -> Result<()> {
    let (data, stop) = (data()?, AtomicBool::new(false));
    let mut teacher = teacher(&data)?;
    // Queries that are made as their keys are look at their own token and at others like it.
    for layer in 0..teacher.config.layers {
        let weight = |name: &str| format!("model.layers.{layer}.self_attn.{name}_proj.weight");
        let keys = teacher.tensors[&weight("k")].chunk(2, 0)?;
        teacher.tensors.insert(weight("q"), Tensor::cat(&[&keys[0], &keys[0], &keys[1], &keys[1]], 0)?);
        let louder = (&teacher.tensors[&weight("o")] * 20.0)?;
        teacher.tensors.insert(weight("o"), louder);
    }
    let (plain, gated) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let of = |attention: &str, folder: &Path, stages: [usize; 2]| {
        let plan = plan(&teacher, attention, folder, &stop);
        let [calibrate_tokens, transfer_steps] = stages;
        convert(&Plan { calibrate_tokens, transfer_steps, tuning: None, ..plan }, &data)
    };
    let without = of("favor:m=8,map=learned", plain.path(), [1000, 40])?;
    let attention = "favor:m=8,map=learned,gate";
    let agreements = |report: &Report| -> Vec<f64> {
        report.stages.iter().map(|stage| stage.measured.held_out.top1_agreement).collect()
    };
    // After each of its stages the conversion goes on from the same folder.
    let weights = |folder: &Path| Pretrained::open(&folder.to_string_lossy()).map(|model| model.tensors);
    let bias = "model.layers.0.self_attn.gate.bias";
    of(attention, gated.path(), [0, 0])?;
    let new = weights(gated.path())?[bias].to_vec1::<f32>()?;
    let context = teacher.config.context as f64;
    assert!(new.iter().all(|&bias| (f64::from(bias).exp() / (16.0 * context - 1.0) - 1.0).abs() < 1e-5), "{new:?}");
    of(attention, gated.path(), [1000, 0])?;
    let paced = weights(gated.path())?;
    let weight = "model.layers.0.self_attn.gate.weight";
    assert!(paced[bias].to_vec1::<f32>()?.iter().zip(&new).any(|(paced, new)| paced < new), "{}", paced[bias]);
    assert!(paced[weight].flatten_all()?.to_vec1::<f32>()?.iter().all(|&w| w == 0.0));
    let report = of(attention, gated.path(), [1000, 40])?;
    let (with, without) = (agreements(&report), agreements(&without));
    assert!((with[1] - without[1]).abs() < 0.02, "{with:?} and {without:?}");
    assert!(with[2] >= without[2] && with[3] > with[2] && with[3] > without[3], "{with:?} and {without:?}");
    let trained = weights(gated.path())?;
    assert!(trained[weight].flatten_all()?.to_vec1::<f32>()?.iter().any(|&w| w != 0.0));
    for (name, tensor) in &teacher.tensors {
        assert_eq!(tensor.flatten_all()?.to_vec1::<f32>()?, trained[name].flatten_all()?.to_vec1::<f32>()?, "{name}");
    }
    Ok(())
}

/// Exact attention may have a forget gate beside layers with features. It is not held against the
/// teacher's attention, so the transfer leaves its gate as it is.
#[test]
fn the_transfer_leaves_gates_of_exact_attention() -> Result<()> {
    let (data, stop, folder) = (data()?, AtomicBool::new(false), tempfile::tempdir()?);
    let teacher = teacher(&data)?;
    let mut plan = plan(&teacher, "favor:m=4,map=learned,gate", folder.path(), &stop);
    plan.config.attention_by_layer.insert(1, "softmax:gate".parse().expect("an attention"));
    let weights = || Pretrained::open(&folder.path().to_string_lossy()).map(|model| model.tensors);
    let gate = |layer: usize| format!("model.layers.{layer}.self_attn.gate.weight");
    let report = convert(&Plan { transfer_steps: 3, tuning: None, ..plan }, &data)?;
    assert_eq!(report.stages.last().map(|stage| stage.name.as_str()), Some("transfer"));
    let trained = weights()?;
    let moved = |layer: usize| -> Result<bool> {
        Ok(trained[&gate(layer)].flatten_all()?.to_vec1::<f32>()?.iter().any(|&w| w != 0.0))
    };
    assert!(moved(0)? && !moved(1)?);
    Ok(())
}
