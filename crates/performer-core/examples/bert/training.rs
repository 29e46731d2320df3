//! This module trains the features that take the place of a model's softmax, and leaves the model's
//! own weights as they are.
//!
//! Training has two parts. In the first, each layer's attention learns to return what softmax
//! returns for the same queries, keys and values, those of the original model. In the second, the
//! whole model learns to return the original's embeddings, so that layers also make up for what
//! the layers before them leave.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Result, Tensor, Var, bail};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder};
use candle_transformers::models::bert::Config;
use performer_core::{Attention, Favor, Inputs, Mask, Softmax, State, features::Fitted};

use super::{
    embed::{padded, pool},
    model::BertModel,
};

/// A `Part` of training takes so many `steps`, at a learning rate that begins at `rate` and falls
/// to 0 in a straight line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) steps: usize,
    pub(crate) rate: f64,
}

/// `Student` holds the features of every layer, whose parameters are variables.
pub(crate) struct Student {
    layers: Vec<Fitted>,
    variables: Vec<Var>,
}

impl Student {
    /// Makes variables of the parameters of each layer's features.
    pub(crate) fn new(start: &[Fitted]) -> Result<Self> {
        let (mut layers, mut variables) = (Vec::new(), Vec::new());
        for fitted in start {
            let named: Vec<(&str, Var)> = fitted
                .tensors()
                .into_iter()
                .map(|(name, t)| Ok((name, Var::from_tensor(t)?)))
                .collect::<Result<_>>()?;
            let find = |name: &str| named.iter().find(|(n, _)| *n == name).map(|(_, var)| var.as_tensor().clone());
            layers.push(Fitted::from_tensors(&find)?);
            variables.extend(named.into_iter().map(|(_, var)| var));
        }
        Ok(Self { layers, variables })
    }

    /// Returns the attention of a layer for use, which keeps nothing for gradients.
    pub(crate) fn attention(&self, layer: usize) -> Result<Arc<dyn Attention>> {
        let tensors = self.layers[layer].tensors();
        let find = |name: &str| tensors.iter().find(|(n, _)| *n == name).map(|(_, tensor)| tensor.detach());
        Ok(Arc::new(Favor::with_map(Box::new(Fitted::from_tensors(&find)?))?))
    }

    /// Returns the attention of a layer for training.
    fn trained(&self, layer: usize) -> Result<Favor> {
        Favor::with_map(Box::new(self.layers[layer].clone()))
    }
}

/// A `Trainer` trains the features of a [`Student`] on `batches` of tokenized texts.
pub(crate) struct Trainer<'a> {
    pub(crate) weights: &'a VarBuilder<'static>,
    pub(crate) config: &'a Config,
    pub(crate) batches: &'a [Vec<Vec<u32>>],
}

impl Trainer<'_> {
    /// The first part: lowers the sum over layers of `‖o − ô‖² / ‖o‖²`, where `o` is what softmax
    /// returns. Calls `watch` with the number of steps done and the loss after each step.
    pub(crate) fn match_layers(&self, student: &Student, part: Part, watch: &mut dyn FnMut(usize, f64)) -> Result<()> {
        let layers: Vec<Arc<Beside>> = (0..student.layers.len())
            .map(|layer| Ok(Arc::new(Beside { student: student.trained(layer)?, differences: Mutex::default() })))
            .collect::<Result<_>>()?;
        let model = BertModel::load(self.weights.clone(), self.config, &|layer| Ok(layers[layer].clone()))?;
        self.descend(student, part, watch, &|ids, mask| {
            model.forward(ids, &ids.zeros_like()?, mask)?;
            let differences: Vec<Tensor> = layers.iter().flat_map(|layer| layer.take()).collect();
            Tensor::stack(&differences, 0)?.sum_all()
        })
    }

    /// The second part: lowers the mean of `1 − cos(e, ê)`, where `e` is the original's embedding
    /// of a text. Calls `watch` as [`Self::match_layers`] does.
    pub(crate) fn match_embeddings(
        &self,
        student: &Student,
        part: Part,
        watch: &mut dyn FnMut(usize, f64),
    ) -> Result<()> {
        let original = BertModel::load(self.weights.clone(), self.config, &|_| Ok(Arc::new(Softmax::new())))?;
        let model = BertModel::load(self.weights.clone(), self.config, &|layer| Ok(Arc::new(student.trained(layer)?)))?;
        let embeddings = |model: &BertModel, ids: &Tensor, mask: &Tensor| -> Result<Tensor> {
            pool(&model.forward(ids, &ids.zeros_like()?, mask)?, mask)
        };
        self.descend(student, part, watch, &|ids, mask| {
            let cosines = (embeddings(&original, ids, mask)? * embeddings(&model, ids, mask)?)?.sum(1)?;
            cosines.mean_all()?.affine(-1.0, 1.0)
        })
    }

    /// Takes the steps of a part, each on the next of the batches, down the gradient of `loss`, a
    /// function of ids and mask `(B, T)`.
    fn descend(
        &self,
        student: &Student,
        part: Part,
        watch: &mut dyn FnMut(usize, f64),
        loss: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        let parameters = ParamsAdamW { lr: part.rate, beta2: 0.99, weight_decay: 0.0, ..Default::default() };
        let mut optimizer = AdamW::new(student.variables.clone(), parameters)?;
        let device = self.weights.device();
        for (step, batch) in self.batches.iter().cycle().take(part.steps).enumerate() {
            optimizer.set_learning_rate(part.rate * (1.0 - step as f64 / part.steps as f64));
            let (ids, mask) = padded(batch, self.config.pad_token_id as u32, device)?;
            let loss = loss(&ids, &mask)?;
            let value = f64::from(loss.to_scalar::<f32>()?);
            if !value.is_finite() {
                bail!("the loss is {value} after {step} steps; train at a lower rate than {}", part.rate);
            }
            optimizer.backward_step(&loss)?;
            watch(step + 1, value);
        }
        Ok(())
    }
}

/// `Beside` is softmax attention that keeps how far the student's attention is from it.
#[derive(Debug)]
struct Beside {
    student: Favor,
    differences: Mutex<Vec<Tensor>>,
}

impl Beside {
    fn take(&self) -> Vec<Tensor> {
        std::mem::take(&mut *self.differences.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Attention for Beside {
    fn forward(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Tensor> {
        let exact = Softmax::new().forward(inputs, mask)?;
        let estimate = self.student.forward(inputs, mask)?;
        // The rows of padding have no meaning.
        let squares = |x: Tensor| -> Result<Tensor> {
            let squares = x.sqr()?.sum(3)?.sum(1)?;
            match mask.visible() {
                Some(real) => (squares * real.to_dtype(x.dtype())?)?.sum_all(),
                None => squares.sum_all(),
            }
        };
        let difference = squares((estimate - &exact)?)?.div(&squares(exact.clone())?)?;
        self.differences.lock().unwrap_or_else(PoisonError::into_inner).push(difference);
        Ok(exact)
    }

    fn advance(&self, _: Inputs<'_>, _: &mut State) -> Result<Tensor> {
        bail!("an encoder does not decode")
    }
}
