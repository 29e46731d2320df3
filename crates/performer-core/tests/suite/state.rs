//! These tests treat the decoding state as an object: it is saved, loaded, forked, cut into rows
//! and joined without changing a bit, and refused wherever it does not belong.

use crate::common::{Problem, Random, all_kernels, conditioned_scale, tensor, values};
use candle_core::{DType, Device, Result, Tensor, Var};
use performer_core::reference::Shape;
use performer_core::{
    Attention, AttentionConfig, Favor, FavorConfig, FeatureMapKind, Inputs, Path, Softmax, State, Windowed,
    attention::StateRecord,
    features::{FeatureMap, HermiteTail, Phase, Trigonometric},
};

const DEVICE: Device = Device::Cpu;
const T: usize = 70;
const SHAPE: Shape = Shape { batch: 3, heads: 4, kv_heads: 2, q_len: T, k_len: T, head_dim: 5, value_dim: 3 };
const PROMPT: usize = 50;

/// A `Case` is an attention with its inputs and its name in messages.
struct Case {
    name: String,
    attention: Box<dyn Attention>,
    inputs: [Tensor; 3],
    gates: Option<Tensor>,
}

/// Returns softmax, every feature map and a window, fused and composed, in f32 and bf16; and all of
/// them with forget gates.
fn cases() -> Result<Vec<Case>> {
    let gates = Problem::random(1, SHAPE, None, 0).gated(2).gate_tensor(DType::F32)?;
    let gated = |case: Case| Case { name: format!("{}, gated", case.name), gates: Some(gates.clone()), ..case };
    Ok(plain_cases()?.into_iter().chain(plain_cases()?.into_iter().map(gated)).collect())
}

fn plain_cases() -> Result<Vec<Case>> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for map in all_kernels() {
            let problem = Problem::random(1, SHAPE, map, 8).scale_qk(conditioned_scale(map));
            let inputs = problem.tensors(dtype)?;
            let name = format!("{map:?} {dtype:?}");
            all.push(Case {
                name: name.clone(),
                attention: problem.attention(dtype)?,
                inputs: inputs.clone(),
                gates: None,
            });
            all.push(Case {
                name: format!("{name}, composed"),
                attention: problem.composed(dtype)?,
                inputs,
                gates: None,
            });
        }
        let problem = Problem::random(1, SHAPE, Some(FeatureMapKind::Positive), 8);
        let inputs = problem.tensors(dtype)?;
        for sinks in [0, 4] {
            all.push(Case {
                name: format!("softmax of 9 and {sinks} sinks {dtype:?}"),
                attention: Box::new(Softmax::new().with_window(9)?.with_sinks(sinks)?),
                inputs: inputs.clone(),
                gates: None,
            });
        }
        // One state has only its window to remember, and the others have more.
        for (window, sinks) in [(8, 0), (64, 0), (8, 4)] {
            let windowed = Windowed::new(window, problem.favor(dtype)?)?.with_sinks(sinks)?;
            let name = format!("window of {window} and {sinks} sinks {dtype:?}");
            all.push(Case { name, attention: Box::new(windowed), inputs: inputs.clone(), gates: None });
        }
    }
    Ok(all)
}

impl Case {
    /// Returns the outputs of tokens `start..end` of the sequences `rows`, from `state` on.
    fn extend(&self, state: &mut State, start: usize, end: usize, rows: &[usize]) -> Result<Vec<f64>> {
        let rows: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        let rows = Tensor::from_slice(&rows, rows.len(), &DEVICE)?;
        let part = |t: &Tensor| t.narrow(2, start, end - start)?.contiguous()?.index_select(&rows, 0);
        let [q, k, v] = &self.inputs;
        let (q, k, v, gates) = (part(q)?, part(k)?, part(v)?, self.gates.as_ref().map(part).transpose()?);
        let mut inputs = Inputs::new(&q, &k, &v);
        inputs.gates = gates.as_ref();
        values(&self.attention.extend(inputs, state)?)
    }

    /// Returns the state after the prompt of the sequences `rows`.
    fn prompt(&self, rows: &[usize]) -> Result<State> {
        let mut state = State::new();
        self.extend(&mut state, 0, PROMPT, rows)?;
        Ok(state)
    }

    /// Returns the outputs of the rest of the sequences, token by token.
    fn rest(&self, mut state: State, rows: &[usize]) -> Result<Vec<Vec<f64>>> {
        (PROMPT..T).map(|t| self.extend(&mut state, t, t + 1, rows)).collect()
    }
}

const ALL: [usize; 3] = [0, 1, 2];

#[test]
fn a_saved_state_goes_on_with_the_same_bits() -> Result<()> {
    for (i, case) in cases()?.iter().enumerate() {
        let state = case.prompt(&ALL)?;
        let path = std::env::temp_dir().join(format!("performer-state-{}-{i}.safetensors", std::process::id()));
        state.save(&path)?;
        let loaded = State::load(&path, &DEVICE)?;
        std::fs::remove_file(&path)?;
        assert_eq!((loaded.tokens(), loaded.batch()), (PROMPT, Some(3)), "{}", case.name);
        // A loaded state that has not been extended can be saved again.
        let again = State::from_record(&loaded.record()?)?;
        let expected = case.rest(state, &ALL)?;
        assert_eq!(case.rest(loaded, &ALL)?, expected, "{}", case.name);
        assert_eq!(case.rest(again, &ALL)?, expected, "{}", case.name);
    }
    Ok(())
}

#[test]
fn a_clone_and_its_origin_go_on_independently() -> Result<()> {
    for case in cases()? {
        let expected = case.rest(case.prompt(&ALL)?, &ALL)?;
        let mut state = case.prompt(&ALL)?;
        let first = state.clone();
        // The original state is extended by other tokens, and forked again later.
        case.extend(&mut state, 0, 7, &ALL)?;
        let second = state.clone();
        case.extend(&mut state, 3, 9, &ALL)?;
        assert_eq!(case.rest(first, &ALL)?, expected, "{}", case.name);
        assert_eq!((second.tokens(), state.tokens()), (PROMPT + 7, PROMPT + 13), "{}", case.name);
        let mut again = case.prompt(&ALL)?;
        case.extend(&mut again, 0, 7, &ALL)?;
        assert_eq!(case.rest(second, &ALL)?, case.rest(again, &ALL)?, "{}", case.name);
    }
    Ok(())
}

#[test]
fn rows_are_dropped_reordered_repeated_and_joined() -> Result<()> {
    for case in cases()? {
        let state = case.prompt(&ALL)?;
        for rows in [&[1][..], &[2, 0], &[0, 0, 1], &[2, 1, 0]] {
            let selected = state.select(rows)?;
            assert_eq!((selected.batch(), selected.tokens()), (Some(rows.len()), PROMPT));
            assert_eq!(case.rest(selected, rows)?, case.rest(case.prompt(rows)?, rows)?, "{} {rows:?}", case.name);
        }
        let (one, two) = (case.prompt(&[1])?, case.prompt(&[2, 0])?);
        let joined = State::join(&[&one, &two])?;
        assert_eq!(joined.batch(), Some(3));
        assert_eq!(case.rest(joined, &[1, 2, 0])?, case.rest(case.prompt(&[1, 2, 0])?, &[1, 2, 0])?, "{}", case.name);
        // Rows are selected from a joined state before it is extended.
        let row = State::join(&[&one, &two])?.select(&[2])?;
        assert_eq!(case.rest(row, &[0])?, case.rest(case.prompt(&[0])?, &[0])?, "{}", case.name);
    }
    Ok(())
}

#[test]
fn rows_that_do_not_exist_or_fit_are_refused() -> Result<()> {
    let all = cases()?;
    let case = &all[0];
    let state = case.prompt(&ALL)?;
    let refused = |result: Result<State>, part: &str| {
        let error = result.expect_err("rows that should be refused").to_string();
        assert!(error.contains(part), "{error}");
    };
    refused(state.select(&[3]), "row 3");
    refused(State::new().select(&[0]), "no token");
    refused(State::join(&[]), "no state");
    refused(State::join(&[&state, &State::new()]), "cannot be joined");
    let mut longer = case.prompt(&ALL)?;
    case.extend(&mut longer, 0, 1, &ALL)?;
    refused(State::join(&[&state, &longer]), "51");
    let other = all.iter().find(|case| case.name.starts_with("Some(Positive)")).unwrap();
    refused(State::join(&[&state, &other.prompt(&ALL)?]), "another attention");
    // One of softmax with forget gates remembers them, and one without has none to be joined.
    let softmax = |case: &&Case| case.name.starts_with("softmax of 9 and 0 sinks F32");
    let states = all.iter().filter(softmax).map(|case| case.prompt(&ALL)).collect::<Result<Vec<_>>>()?;
    let [plain, gated] = &states[..] else { panic!("a case without gates, and one with them") };
    refused(State::join(&[plain, gated]), "give forget gates to all of them or to none");
    refused(State::join(&[gated, plain]), "give forget gates to all of them or to none");
    // What is nested in a window's memory is of one kind too: both sums have the same names.
    let x = Tensor::randn(0f32, 1.0, (1, 2, 20, 8), &DEVICE)?;
    let favor = Favor::new(&FavorConfig::default().with_features(16), 8, 1, DType::F32, &DEVICE)?;
    let fused = Windowed::new(4, favor)?;
    let [mut one, mut other] = [State::new(), State::new()];
    fused.extend(Inputs::new(&x, &x, &x), &mut one)?;
    fused.extend(Inputs::new(&x, &x, &x), &mut other)?;
    let mut record = other.record()?;
    let kind = record.fields.values_mut().find(|value| value.contains("fused CPU kernels")).expect("a kind");
    *kind = kind.replace("CPU", "CUDA");
    refused(State::join(&[&one, &State::from_record(&record)?]), "fused CUDA kernels");
    Ok(())
}

/// All sizes are equal; only the attention that made the state differs.
#[test]
fn a_state_of_another_seed_dtype_size_or_path_is_refused_with_the_reason() -> Result<()> {
    let favor = |m, seed, map| {
        let config = FavorConfig::default().with_map(map).with_features(m);
        Favor::new(&config, 8, seed, DType::F32, &DEVICE)
    };
    let positive = FeatureMapKind::Positive;
    let x = Tensor::randn(0f32, 1.0, (1, 2, 20, 8), &DEVICE)?;
    let made = favor(16, 1, positive)?;
    let mut state = State::new();
    made.extend(Inputs::new(&x, &x, &x), &mut state)?;
    let refused = |attention: &dyn Attention, x: &Tensor, parts: &[&str]| {
        // The state is tested in the form with which an attention works, and as loaded from a file.
        for mut state in [state.clone(), State::from_record(&state.record().unwrap()).unwrap()] {
            let error = attention.extend(Inputs::new(x, x, x), &mut state).expect_err("a foreign state").to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error} lacks one of {parts:?}");
            assert_eq!(state.tokens(), 20);
        }
    };
    refused(&favor(16, 2, positive)?, &x, &["state", "another seed"]);
    refused(&favor(24, 1, positive)?, &x, &["features 16 and not 24"]);
    refused(&favor(16, 1, FeatureMapKind::Relu)?, &x, &["map Positive and not Relu"]);
    refused(&Softmax::new(), &x, &["another attention", "FAVOR"]);
    refused(&Windowed::new(4, favor(16, 1, positive)?)?, &x, &["window none and not 4"]);
    refused(&Windowed::new(4, favor(16, 1, positive)?)?.with_sinks(2)?, &x, &["sinks none and not 2"]);
    refused(&favor(16, 1, positive)?, &x.to_dtype(DType::BF16)?, &["F32", "BF16"]);
    refused(&favor(16, 1, positive)?.composed(), &x, &["fused CPU kernels", "another path", "composed operations"]);
    let mut near = State::new();
    Softmax::new().with_window(4)?.extend(Inputs::new(&x, &x, &x), &mut near)?;
    for (window, sinks, part) in [(5, 0, "window 4 and not 5"), (4, 2, "sinks none and not 2")] {
        let other = Softmax::new().with_window(window)?.with_sinks(sinks)?;
        let error = other.extend(Inputs::new(&x, &x, &x), &mut near).expect_err("another window").to_string();
        assert!(error.contains(part), "{error}");
    }
    // Learned maps are identified by their numbers.
    let learned = [1, 2].map(|seed| favor(16, seed, FeatureMapKind::Learned));
    let mut state = State::new();
    let [one, two] = learned;
    one?.extend(Inputs::new(&x, &x, &x), &mut state)?;
    let error = two?.extend(Inputs::new(&x, &x, &x), &mut state).expect_err("another seed").to_string();
    assert!(error.contains("another seed"), "{error}");
    Ok(())
}

/// A map that is trained has the numbers of the moment: a state from before a step of the training
/// is of another map.
#[test]
fn a_state_of_a_map_that_was_trained_since_is_refused() -> Result<()> {
    let x = Tensor::randn(0f32, 1.0, (1, 2, 7, 4), &DEVICE)?;
    for map in [FeatureMapKind::Learned, FeatureMapKind::Hedgehog] {
        for window in [None, Some(2)] {
            let config = FavorConfig::default().with_map(map).with_features(16);
            let mut favor = Favor::new(&config, 4, 1, DType::F32, &DEVICE)?;
            let buffers = favor.buffers().into_iter();
            let vars: Vec<(String, Var)> =
                buffers.map(|(name, t)| Ok((name, Var::from_tensor(&t.copy()?)?))).collect::<Result<_>>()?;
            favor.load_buffers(&|name| vars.iter().find(|(n, _)| n == name).map(|(_, var)| var.as_tensor().clone()))?;
            let attention: Box<dyn Attention> = match window {
                Some(window) => Box::new(Windowed::new(window, favor)?),
                None => Box::new(favor),
            };
            let mut state = State::new();
            attention.extend(Inputs::new(&x, &x, &x), &mut state)?;
            attention.extend(Inputs::new(&x, &x, &x), &mut state)?;
            for (_, var) in &vars {
                var.set(&(var.as_tensor() * 1.5)?)?;
            }
            let error = attention.extend(Inputs::new(&x, &x, &x), &mut state).expect_err("trained since").to_string();
            assert!(error.contains("another seed"), "{map}, window {window:?}: {error}");
        }
    }
    Ok(())
}

/// Damage is an error that names the file or the tensor, not a wrong answer.
#[test]
fn damaged_files_are_refused() -> Result<()> {
    let case = cases()?.into_iter().find(|case| case.name == "Some(Positive) F32").unwrap();
    let record = case.prompt(&ALL)?.record()?;
    let go_on = |record| case.rest(State::from_record(&record)?, &ALL).map(drop);
    assert!(go_on(record.clone()).is_ok());
    for name in record.tensors.keys() {
        let mut damaged = record.clone();
        damaged.tensors.remove(name);
        assert!(go_on(damaged).is_err(), "without {name}");
        let mut damaged = record.clone();
        let tensor = damaged.tensors[name].clone();
        damaged.tensors.insert(name.clone(), tensor.narrow(0, 0, 2)?);
        let error = go_on(damaged).expect_err("two rows of three").to_string();
        assert!(error.contains("first dimension"), "{name}: {error}");
        let mut damaged = record.clone();
        damaged.tensors.insert(name.clone(), tensor.narrow(3, 0, 1)?.contiguous()?);
        let shorter = damaged.tensors[name].dims() != tensor.dims();
        assert_eq!(go_on(damaged).is_err(), shorter, "{name} cut to a column");
    }
    for field in ["tokens", "batch", "head_dim", "dtype", "attention.features", "attention.digest", "memory"] {
        let mut damaged = record.clone();
        damaged.fields.insert(field.to_string(), "7".to_string());
        let result = go_on(damaged);
        assert!(result.is_err() || field == "tokens", "{field} of 7");
    }
    // Tokens need a batch that they are of, and a state of no tokens has none.
    let mut without = record.clone();
    without.fields.remove("batch");
    let error = State::from_record(&without).expect_err("tokens of nothing").to_string();
    assert!(error.contains("50 tokens but no batch"), "{error}");
    assert_eq!(State::from_record(&State::new().record()?)?.tokens(), 0);
    let path = std::env::temp_dir().join(format!("performer-damaged-{}.safetensors", std::process::id()));
    record.save(&path)?;
    let bytes = std::fs::read(&path)?;
    std::fs::write(&path, &bytes[..bytes.len() / 2])?;
    let error = State::load(&path, &DEVICE).expect_err("half a file").to_string();
    std::fs::remove_file(&path)?;
    assert!(error.contains("performer-damaged"), "{error}");
    let error = State::load("no/such/file", &DEVICE).expect_err("no file").to_string();
    assert!(error.contains("no/such/file"), "{error}");
    Ok(())
}

/// A state that counts tokens and has lost what it remembers of them would otherwise go on as if it
/// were empty.
#[test]
fn a_state_without_its_memory_is_refused() -> Result<()> {
    for case in cases()? {
        let mut record = case.prompt(&ALL)?.record()?;
        record.fields.remove("memory");
        let refused = State::from_record(&record).and_then(|state| case.rest(state, &ALL));
        let error = refused.expect_err(&case.name).to_string();
        assert!(error.contains("damaged"), "{}: {error}", case.name);
    }
    Ok(())
}

/// The maps `phase` and `gaussian-phase` have one type, and the same numbers where they have one
/// seed.
#[test]
fn a_state_of_another_phase_map_is_refused() -> Result<()> {
    let made = |map| Favor::new(&FavorConfig::default().with_map(map).with_features(8), 5, 1, DType::F32, &DEVICE);
    let problem = Problem::random(1, SHAPE, Some(FeatureMapKind::Phase), 8);
    let [q, k, v] = problem.tensors(DType::F32)?;
    let mut state = State::new();
    made(FeatureMapKind::Phase)?.extend(Inputs::new(&q, &k, &v), &mut state)?;
    let other = made(FeatureMapKind::GaussianPhase)?.extend(Inputs::new(&q, &k, &v), &mut state);
    let error = other.expect_err("another map").to_string();
    assert!(error.contains("Phase") && error.contains("GaussianPhase"), "{error}");
    Ok(())
}

/// Each tensor of a file is held to the others by itself, and the error is theirs, not one of
/// whatever would be computed from them.
#[test]
fn tensors_that_do_not_belong_together_are_refused() -> Result<()> {
    for (name, part) in [
        ("Some(Positive) F32", "do not belong together"),
        ("Some(Positive) F32, composed", "its sums have shape"),
        ("None F32", "do not belong together"),
    ] {
        let case = cases()?.into_iter().find(|case| case.name == name).unwrap();
        let record = case.prompt(&ALL)?.record()?;
        for (tensor, was) in &record.tensors {
            // One row more, and for keys and values, one token more.
            let longer = Tensor::cat(&[was, &was.narrow(2, 0, 1)?], 2)?;
            let mut all = vec![longer, was.to_dtype(DType::F64)?];
            if tensor.ends_with("sums") {
                // No values at all, by whose number rows would be divided.
                all.push(was.narrow(3, 0, 0)?);
            }
            for wrong in all {
                let mut damaged = record.clone();
                damaged.tensors.insert(tensor.clone(), wrong);
                let go_on = || case.rest(State::from_record(&damaged)?, &ALL);
                let error = go_on().expect_err(tensor).to_string();
                assert!(error.contains(part), "{name}, {tensor}: {error}");
            }
        }
    }
    Ok(())
}

#[test]
fn gates_that_are_not_those_of_the_keys_are_refused() -> Result<()> {
    for name in ["None F32, gated", "softmax of 9 and 0 sinks F32, gated"] {
        let case = cases()?.into_iter().find(|case| case.name == name).unwrap();
        let record = case.prompt(&ALL)?.record()?;
        let gates = &record.tensors["memory.gates"];
        let (twice, one_token, one_head) =
            (Tensor::cat(&[gates, gates], 2)?, gates.narrow(2, 0, 1)?, gates.narrow(1, 0, 1)?);
        for wrong in [twice, one_token, one_head] {
            let mut damaged = record.clone();
            damaged.tensors.insert("memory.gates".into(), wrong.contiguous()?);
            let go_on = || case.rest(State::from_record(&damaged)?, &ALL);
            let error = go_on().expect_err("other gates").to_string();
            assert!(error.contains("do not belong together"), "{name}: {error}");
        }
    }
    Ok(())
}

/// A file may claim what no attention leaves behind: more tokens than there are keys, a window of
/// more tokens than it has, no heads. It is refused before anything is computed or made room for.
#[test]
fn claims_that_no_attention_makes_are_refused() -> Result<()> {
    let x = Tensor::randn(0f32, 1.0, (1, 2, 7, 4), &DEVICE)?;
    let gates = Tensor::full(-0.5f32, (1, 2, 7), &DEVICE)?;
    let build = |spec: &str| -> Result<Box<dyn Attention>> {
        let config: AttentionConfig = spec.parse().map_err(candle_core::Error::Msg)?;
        config.build(4, 3, DType::F32, &DEVICE)
    };
    let made = |spec: &str, gated: bool| -> Result<StateRecord> {
        let mut state = State::new();
        let inputs = Inputs::new(&x, &x, &x);
        build(spec)?.extend(if gated { inputs.with_gates(&gates) } else { inputs }, &mut state)?;
        state.record()
    };
    let refused = |spec: &str, record: &StateRecord, parts: &[&str]| {
        let go_on = || -> Result<()> {
            let mut state = State::from_record(record)?;
            build(spec)?.extend(Inputs::new(&x, &x, &x).with_gates(&gates), &mut state)?;
            Ok(())
        };
        let error = go_on().expect_err(spec).to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{spec}: {error} lacks one of {parts:?}");
    };
    let mut most = made("favor:m=8", false)?;
    most.fields.insert("tokens".into(), (usize::MAX >> 8).to_string());
    assert_eq!(State::from_record(&most)?.tokens(), usize::MAX >> 8);
    most.fields.insert("tokens".into(), ((usize::MAX >> 8) + 1).to_string());
    assert!(State::from_record(&most).is_err());
    let all = ["favor:m=8", "favor:m=8,window=4,sinks=1", "softmax", "softmax:window=4,sinks=1"];
    for spec in all {
        let mut record = made(spec, false)?;
        record.fields.insert("tokens".into(), u64::MAX.to_string());
        refused(spec, &record, &["18446744073709551615 tokens"]);
    }
    for gated in [false, true] {
        for tokens in ["6", "1000000000000"] {
            let mut record = made("softmax", gated)?;
            record.fields.insert("tokens".into(), tokens.into());
            refused("softmax", &record, &["7 tokens", tokens]);
        }
        for (spec, more) in
            [("favor:m=8,window=4,sinks=1", 1), ("softmax:window=4,sinks=1", 1), ("softmax:window=4", 3)]
        {
            let mut record = made(spec, gated)?;
            for (name, tensor) in &mut record.tensors {
                if ["memory.keys", "memory.values", "memory.gates"].contains(&name.as_str()) {
                    *tensor = Tensor::cat(&[&*tensor, &tensor.narrow(2, 0, more)?], 2)?;
                }
            }
            refused(spec, &record, &["window", "tokens"]);
        }
    }
    let mut record = made("favor:m=8", false)?;
    for tensor in record.tensors.values_mut() {
        *tensor = tensor.narrow(1, 0, 0)?;
    }
    refused("favor:m=8", &record, &["sums of 0 heads"]);
    Ok(())
}

/// The path says which implementation computes a call, and why it is slow if it is.
#[test]
fn the_path_is_visible() -> Result<()> {
    let favor = |map| Favor::new(&FavorConfig::default().with_map(map), 8, 1, DType::F32, &DEVICE);
    let x = Tensor::randn(0f32, 1.0, (1, 2, 20, 8), &DEVICE)?;
    let gates = Tensor::full(-0.1f32, (1, 2, 20), &DEVICE)?;
    // Forget gates go through the same kernels.
    let path = |attention: &dyn Attention, dtype| {
        let x = x.to_dtype(dtype)?;
        let inputs = Inputs::new(&x, &x, &x);
        let mask = performer_core::Mask::causal();
        let (without, with) = (attention.path(inputs, &mask)?, attention.path(inputs.with_gates(&gates), &mask)?);
        assert_eq!(with, without, "{attention:?}");
        Ok::<_, candle_core::Error>(without)
    };
    let positive = FeatureMapKind::Positive;
    let attentions: [Box<dyn Attention>; 5] = [
        Box::new(Softmax::new()),
        Box::new(Softmax::new().with_window(4)?.with_sinks(1)?),
        Box::new(favor(positive)?),
        Box::new(favor(FeatureMapKind::Trigonometric)?),
        Box::new(Windowed::new(4, favor(positive)?)?),
    ];
    for attention in &attentions {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            assert_eq!(path(&**attention, dtype)?, Path::Fused { device: "CPU" }, "{attention:?}");
        }
        let why = path(&**attention, DType::F64)?.to_string();
        assert!(why.contains("composed") && why.contains("F64"), "{attention:?}: {why}");
    }
    for attention in [
        Box::new(Softmax::new().composed()) as Box<dyn Attention>,
        Box::new(favor(positive)?.composed()),
        Box::new(Windowed::new(4, favor(positive)?)?.composed()),
    ] {
        assert_eq!(path(&*attention, DType::F32)?, Path::Composed { why: "it was asked for".into() });
    }
    Ok(())
}

/// A state holds what it remembers and no more, and nothing of it changes with the tensors that it
/// was made from.
#[test]
fn a_window_keeps_nothing_of_the_callers_tensors() -> Result<()> {
    for attention in [Softmax::new().with_window(4)?, Softmax::new()] {
        let k = Tensor::zeros((1, 1, 3, 8), DType::F32, &DEVICE)?;
        let gates = Tensor::zeros((1, 1, 3), DType::F32, &DEVICE)?;
        let mut state = State::new();
        attention.extend(Inputs::new(&k, &k, &k).with_gates(&gates), &mut state)?;
        k.slice_set(&Tensor::ones((1, 1, 3, 8), DType::F32, &DEVICE)?, 2, 0)?;
        gates.slice_set(&(Tensor::ones((1, 1, 3), DType::F32, &DEVICE)? * -1.0)?, 2, 0)?;
        for (name, tensor) in &state.record()?.tensors {
            assert!(values(tensor)?.iter().all(|&x| x == 0.0), "{name}: {tensor}");
        }
    }
    let k = Tensor::zeros((1, 1, 5000, 8), DType::F32, &DEVICE)?;
    let mut state = State::new();
    Softmax::new().with_window(4)?.extend(Inputs::new(&k, &k, &k), &mut state)?;
    let record = state.record()?;
    let (storage, _) = record.tensors["memory.keys"].storage_and_layout();
    let candle_core::Storage::Cpu(candle_core::CpuStorage::F32(numbers)) = &*storage else { panic!("f32 on the CPU") };
    assert_eq!(numbers.len(), 3 * 8);
    Ok(())
}

/// Saving touches no other file.
#[test]
fn a_saved_state_leaves_other_files_alone() -> Result<()> {
    let folder = std::env::temp_dir().join(format!("performer-core-states-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let (one, other) = (folder.join("s.new"), folder.join("s"));
    let x = Tensor::zeros((1, 1, 2, 4), DType::F32, &DEVICE)?;
    let mut state = State::new();
    Softmax::new().extend(Inputs::new(&x, &x, &x), &mut state)?;
    state.save(&one)?;
    state.save(&other)?;
    for path in [&one, &other] {
        assert_eq!(State::load(path, &DEVICE)?.tokens(), 2);
    }
    assert_eq!(std::fs::read_dir(&folder)?.count(), 2);
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

/// A map of one's own may have a random projection that is no parameter. Sums over the features of
/// one are none over those of another.
#[test]
fn a_state_of_other_constants_is_refused() -> Result<()> {
    let random = |seed: u64, dims: &[usize]| {
        tensor(&Random::new(seed).normal(dims.iter().product(), 1.0), dims, DType::F32, &DEVICE)
    };
    let x = random(1, &[1, 1, 3, 4])?;
    let maps = |seed: u64| -> Result<[Box<dyn FeatureMap>; 3]> {
        let (projection, offsets) = (random(seed, &[6, 4])?, random(seed, &[6])?);
        Ok([
            Box::new(Trigonometric::new(projection.clone())?),
            Box::new(Phase::new(projection.clone(), offsets, true)?),
            Box::new(HermiteTail::new(projection)?),
        ])
    };
    for ((own, same), other) in maps(2)?.into_iter().zip(maps(2)?).zip(maps(3)?) {
        let mut state = State::new();
        Favor::with_map(own)?.extend(Inputs::new(&x, &x, &x), &mut state)?;
        Favor::with_map(same)?.extend(Inputs::new(&x, &x, &x), &mut state)?;
        assert!(Favor::with_map(other)?.extend(Inputs::new(&x, &x, &x), &mut state).is_err());
        assert_eq!(state.tokens(), 6);
    }
    Ok(())
}
