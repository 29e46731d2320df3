//! This module trains the features that take the place of a model's softmax, and at last the
//! model's own weights beside them.
//!
//! Training has three parts. In the first, each layer's attention learns to return what softmax
//! returns for the same queries, keys and values, those of the original model. In the second, the
//! whole model learns to return the original's hidden states and embeddings, so that layers also
//! make up for what the layers before them leave. In the third, the weights of its layers learn
//! that as well.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_nn::{AdamW, Init, Optimizer, ParamsAdamW, VarBuilder, var_builder::SimpleBackend};
use candle_transformers::models::bert::Config;
use performer_core::{Attention, Favor, Inputs, Mask, Softmax, State, features::Fitted};

use super::{
    embed::{padded, pool},
    model::BertModel,
};

/// A `Part` of training takes so many `steps`. The learning rate rises to `rate` over the first
/// tenth of them, and then falls to 0; both in a straight line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) steps: usize,
    pub(crate) rate: f64,
}

impl Part {
    /// Returns the learning rate of a step, which are counted from 0.
    pub(crate) fn rate_at(self, step: usize) -> f64 {
        let rising = self.steps.div_ceil(10);
        let falling = self.steps - rising;
        let share =
            if step < rising { (step + 1) as f64 / rising as f64 } else { (self.steps - step) as f64 / falling as f64 };
        self.rate * share
    }
}

/// `Student` holds the features of every layer, whose parameters are variables, and the weights of
/// the model. Those of its layers are variables; the embeddings of tokens stay as they are.
pub(crate) struct Student {
    layers: Vec<Fitted>,
    variables: Vec<Var>,
    weights: StudentWeights,
}

/// Returns where a model's file has the features of a layer.
fn features_of(layer: usize) -> String {
    format!("encoder.layer.{layer}.attention.self.features")
}

/// Returns the attention of a layer with the features that are among the tensors of a model's file,
/// or nothing if there are none.
///
/// # Errors
/// If a part of them is missing, or they do not fit each other.
pub(crate) fn saved_attention(tensors: &HashMap<String, Tensor>, layer: usize) -> Result<Option<Arc<dyn Attention>>> {
    let place = features_of(layer);
    if !tensors.keys().any(|name| name.starts_with(&place)) {
        return Ok(None);
    }
    let features = Fitted::from_tensors(&|name| tensors.get(&format!("{place}.{name}")).cloned())?;
    Ok(Some(Arc::new(Favor::with_map(Box::new(features))?)))
}

/// `StudentWeights` are the original's weights, of which those of layers become variables where
/// they are first asked for.
#[derive(Clone)]
struct StudentWeights {
    original: VarBuilder<'static>,
    variables: Arc<Mutex<HashMap<String, Var>>>,
    learner: Learner,
}

impl SimpleBackend for StudentWeights {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, _: &Device) -> Result<Tensor> {
        let original = || self.original.get_with_hints_dtype(shape.clone(), name, Init::Const(0.0), dtype);
        if !name.contains("encoder.layer.") {
            return original();
        }
        let mut variables = self.variables.lock().unwrap_or_else(PoisonError::into_inner);
        if !variables.contains_key(name) {
            variables.insert(name.to_owned(), Var::from_tensor(&original()?)?);
        }
        let variable = &variables[name];
        Ok(match self.learner {
            Learner::Features => variable.as_detached_tensor(),
            Learner::FeaturesAndWeights => variable.as_tensor().clone(),
        })
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("the shape of {name} is not known")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.original.contains_tensor(name)
    }
}

/// `Learner` says what of a student is trained.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Learner {
    Features,
    FeaturesAndWeights,
}

impl Student {
    /// Makes variables of the parameters of each layer's features.
    pub(crate) fn new(start: &[Fitted], original: VarBuilder<'static>) -> Result<Self> {
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
        let weights = StudentWeights { original, variables: Arc::default(), learner: Learner::Features };
        Ok(Self { layers, variables, weights })
    }

    /// Returns the weights of the model, through which gradients flow to those that the learner
    /// trains.
    pub(crate) fn weights(&self, learner: Learner) -> VarBuilder<'static> {
        let weights = StudentWeights { learner, ..self.weights.clone() };
        let (dtype, device) = (self.weights.original.dtype(), self.weights.original.device().clone());
        VarBuilder::from_backend(Box::new(weights), dtype, device)
    }

    /// Returns the variables that the learner trains, once a model has been made of the weights.
    fn variables(&self, learner: Learner) -> Vec<Var> {
        let weights = self.weights.variables.lock().unwrap_or_else(PoisonError::into_inner);
        let weights = weights.values().filter(|_| learner == Learner::FeaturesAndWeights);
        self.variables.iter().chain(weights).cloned().collect()
    }

    /// Returns the attention of a layer for use, which keeps nothing for gradients.
    pub(crate) fn attention(&self, layer: usize) -> Result<Arc<dyn Attention>> {
        let tensors = self.layers[layer].tensors();
        let find = |name: &str| tensors.iter().find(|(n, _)| *n == name).map(|(_, tensor)| tensor.detach());
        Ok(Arc::new(Favor::with_map(Box::new(Fitted::from_tensors(&find)?))?))
    }

    /// Returns the parameters of the features, and the weights that were variables, by their names
    /// in the file of a model.
    pub(crate) fn tensors(&self) -> HashMap<String, Tensor> {
        let weights = self.weights.variables.lock().unwrap_or_else(PoisonError::into_inner);
        let weights = weights.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor()));
        let features = self.layers.iter().enumerate().flat_map(|(layer, features)| {
            let tensors = features.tensors().into_iter();
            tensors.map(move |(name, tensor)| (format!("{}.{name}", features_of(layer)), tensor.detach()))
        });
        weights.chain(features).collect()
    }

    /// Returns the attention of a layer for training.
    fn trained(&self, layer: usize) -> Result<Favor> {
        Favor::with_map(Box::new(self.layers[layer].clone()))
    }
}

/// A `Trainer` trains a [`Student`] on `batches` of tokenized texts.
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
        self.descend(student.variables(Learner::Features), part, watch, &|ids, mask| {
            model.forward(ids, &ids.zeros_like()?, mask)?;
            let differences: Vec<Tensor> = layers.iter().flat_map(|layer| layer.take()).collect();
            Tensor::stack(&differences, 0)?.sum_all()
        })
    }

    /// The second and the third part: lowers `1 − cos(e, ê)`, where `e` is the original's embedding
    /// of a text, and the mean over layers of `‖h − ĥ‖² / ‖h‖²`, where `h` are its hidden states
    /// after the layer. Calls `watch` as [`Self::match_layers`] does.
    pub(crate) fn match_model(
        &self,
        student: &Student,
        learner: Learner,
        part: Part,
        watch: &mut dyn FnMut(usize, f64),
    ) -> Result<()> {
        let original = BertModel::load(self.weights.clone(), self.config, &|_| Ok(Arc::new(Softmax::new())))?;
        let weights = student.weights(learner);
        let model = BertModel::load(weights, self.config, &|layer| Ok(Arc::new(student.trained(layer)?)))?;
        let run = |model: &BertModel, ids: &Tensor, mask: &Tensor| -> Result<(Tensor, Vec<Tensor>)> {
            let mut layers = Vec::new();
            let last =
                model.forward_by_layer(ids, &ids.zeros_like()?, mask, &mut |hidden| layers.push(hidden.clone()))?;
            Ok((pool(&last, mask)?, layers))
        };
        self.descend(student.variables(learner), part, watch, &|ids, mask| {
            let (expected, states) = run(&original, ids, mask)?;
            let (embeddings, estimates) = run(&model, ids, mask)?;
            let cosine = (expected * embeddings)?.sum(1)?.mean_all()?;
            // The rows of padding have no meaning.
            let real = mask.to_dtype(DType::F32)?.unsqueeze(2)?;
            let squares = |x: &Tensor| x.sqr()?.broadcast_mul(&real)?.sum_all();
            let differences: Vec<Tensor> = states
                .iter()
                .zip(&estimates)
                .map(|(exact, estimate)| squares(&(estimate - exact)?)?.div(&squares(exact)?))
                .collect::<Result<_>>()?;
            Tensor::stack(&differences, 0)?.mean_all()? + cosine.affine(-1.0, 1.0)?
        })
    }

    /// Takes the steps of a part, each on the next of the batches, down the gradient of `loss`, a
    /// function of ids and mask `(B, T)`.
    fn descend(
        &self,
        variables: Vec<Var>,
        part: Part,
        watch: &mut dyn FnMut(usize, f64),
        loss: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        let parameters = ParamsAdamW { lr: part.rate, beta2: 0.99, weight_decay: 0.0, ..Default::default() };
        let mut optimizer = AdamW::new(variables, parameters)?;
        let device = self.weights.device();
        for (step, batch) in self.batches.iter().cycle().take(part.steps).enumerate() {
            optimizer.set_learning_rate(part.rate_at(step));
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
