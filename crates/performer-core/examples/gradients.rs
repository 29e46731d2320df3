//! This example shows which gradients flow through Candle's fused operations, and through the
//! operations of this crate that take their place.
//!
//! `cargo run --release -p performer-core --example gradients`
//!
//! Each operation runs on variables of its own, and a loss of its output is differentiated.
//! `docs/gradients.md` shows the table.

use candle_core::{Device, Result, Tensor, Var};
use candle_nn::{LayerNorm, Module, RmsNorm, ops as theirs, rotary_emb};
use performer_core::{nn, ops};

const EPS: f64 = 1e-5;

/// An `Operation` is an operation on some of the variables.
type Operation = fn(&[Tensor]) -> Result<Tensor>;

/// A `Case` is one of Candle's operations, and the one that takes its place.
struct Case {
    candle: &'static str,
    here: &'static str,
    /// The names and shapes of the variables.
    variables: &'static [(&'static str, &'static [usize])],
    /// Candle's operation, then this crate's.
    operations: [Operation; 2],
}

/// A `Row` is a row of the table.
pub(crate) struct Row {
    pub(crate) candle: &'static str,
    pub(crate) here: &'static str,
    pub(crate) variables: Vec<&'static str>,
    /// The variables that got a gradient from Candle's operation, and from this crate's.
    pub(crate) gradients: [Vec<&'static str>; 2],
}

const NORM: &[(&str, &[usize])] = &[("x", &[2, 3, 8]), ("weight", &[8]), ("bias", &[8])];
const RMS: &[(&str, &[usize])] = &[("x", &[2, 3, 8]), ("weight", &[8])];
const ROWS: &[(&str, &[usize])] = &[("x", &[2, 3, 8])];
const HEADS: &[(&str, &[usize])] = &[("x", &[2, 4, 5, 8])];
const TOKENS: &[(&str, &[usize])] = &[("x", &[2, 5, 4, 8])];

const CASES: [Case; 8] = [
    Case {
        candle: "candle_nn::LayerNorm",
        here: "`nn::LayerNorm`",
        variables: NORM,
        operations: [
            |t| LayerNorm::new(t[1].clone(), t[2].clone(), EPS).forward(&t[0]),
            |t| nn::LayerNorm::new(t[1].clone(), t[2].clone(), EPS).forward(&t[0]),
        ],
    },
    Case {
        candle: "candle_nn::RmsNorm",
        here: "`nn::RmsNorm`",
        variables: RMS,
        operations: [
            |t| RmsNorm::new(t[1].clone(), EPS).forward(&t[0]),
            |t| nn::RmsNorm::new(t[1].clone(), EPS).forward(&t[0]),
        ],
    },
    Case {
        candle: "candle_nn::ops::layer_norm",
        here: "`ops::layer_norm`",
        variables: NORM,
        operations: [
            |t| theirs::layer_norm(&t[0], &t[1], &t[2], EPS as f32),
            |t| ops::layer_norm(&t[0], &t[1], &t[2], EPS),
        ],
    },
    Case {
        candle: "candle_nn::ops::rms_norm",
        here: "`ops::rms_norm`",
        variables: RMS,
        operations: [|t| theirs::rms_norm(&t[0], &t[1], EPS as f32), |t| ops::rms_norm(&t[0], &t[1], EPS)],
    },
    Case {
        candle: "candle_nn::ops::softmax_last_dim",
        here: "`ops::softmax`",
        variables: ROWS,
        operations: [|t| theirs::softmax_last_dim(&t[0]), |t| ops::softmax(&t[0])],
    },
    Case {
        candle: "candle_nn::rotary_emb::rope",
        here: "`ops::rotary`",
        variables: HEADS,
        operations: [
            |t| rotary_emb::rope(&t[0], &angles()?.cos()?, &angles()?.sin()?),
            |t| ops::rotary(&t[0], &angles()?.cos()?, &angles()?.sin()?),
        ],
    },
    Case {
        candle: "candle_nn::rotary_emb::rope_i",
        here: "`ops::rotary_interleaved`",
        variables: HEADS,
        operations: [
            |t| rotary_emb::rope_i(&t[0], &angles()?.cos()?, &angles()?.sin()?),
            |t| ops::rotary_interleaved(&t[0], &angles()?.cos()?, &angles()?.sin()?),
        ],
    },
    Case {
        candle: "candle_nn::rotary_emb::rope_thd",
        here: "`ops::rotary` between two transpositions",
        variables: TOKENS,
        operations: [
            |t| rotary_emb::rope_thd(&t[0], &angles()?.cos()?, &angles()?.sin()?),
            |t| ops::rotary(&t[0].transpose(1, 2)?, &angles()?.cos()?, &angles()?.sin()?)?.transpose(1, 2),
        ],
    },
];

/// Returns the angles of 5 tokens for 4 pairs.
fn angles() -> Result<Tensor> {
    Tensor::arange(0f32, 20.0, &Device::Cpu)?.affine(0.1, 0.0)?.reshape((5, 4))
}

/// Returns the names of the variables that get a gradient, and the output.
fn differentiate(case: &Case, operation: Operation) -> Result<(Vec<&'static str>, Tensor)> {
    let variables: Vec<Var> = case
        .variables
        .iter()
        .map(|(_, shape)| {
            let count: usize = shape.iter().product();
            let values: Vec<f32> = (0..count).map(|i| (i as f32 * 12.9898).sin()).collect();
            Var::from_tensor(&Tensor::from_vec(values, *shape, &Device::Cpu)?)
        })
        .collect::<Result<_>>()?;
    let tensors: Vec<Tensor> = variables.iter().map(|var| var.as_tensor().clone()).collect();
    let output = operation(&tensors)?;
    let gradients = output.sqr()?.sum_all()?.backward()?;
    let names = case.variables.iter().zip(&variables).filter(|(_, var)| gradients.get(var).is_some());
    Ok((names.map(|((name, _), _)| *name).collect(), output))
}

/// Runs every operation.
///
/// # Errors
/// If an operation of this crate gives other numbers than Candle's.
pub(crate) fn table() -> Result<Vec<Row>> {
    let row = |case: &Case| {
        let [(theirs, expected), (ours, output)] =
            [differentiate(case, case.operations[0])?, differentiate(case, case.operations[1])?];
        let difference = (output - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
        if difference > 1e-5 {
            candle_core::bail!("{} is off {} by {difference}", case.here, case.candle);
        }
        let variables = case.variables.iter().map(|(name, _)| *name).collect();
        Ok(Row { candle: case.candle, here: case.here, variables, gradients: [theirs, ours] })
    };
    CASES.iter().map(row).collect()
}

/// Returns the table as Markdown.
pub(crate) fn markdown(rows: &[Row]) -> String {
    let list = |names: &[&str]| if names.is_empty() { "none".into() } else { names.join(", ") };
    let mut text = String::from(
        "| Candle's operation | what gets a gradient | in its place | what gets a gradient |\n|---|---|---|---|\n",
    );
    for Row { candle, here, gradients: [theirs, ours], .. } in rows {
        text += &format!("| `{candle}` | {} | {here} | {} |\n", list(theirs), list(ours));
    }
    text
}

fn main() -> Result<()> {
    let rows = table()?;
    print!("{}", markdown(&rows));
    let count = |names: fn(&Row) -> &Vec<&'static str>| rows.iter().map(|row| names(row).len()).sum::<usize>();
    let [theirs, ours] = [count(|row| &row.gradients[0]), count(|row| &row.gradients[1])];
    let all = count(|row| &row.variables);
    println!(
        "\nOf {all} variables, {theirs} get a gradient from Candle's operations and {ours} from those in their place."
    );
    Ok(())
}
