//! What the library says while it works. It prints nothing itself: every function that has
//! something to say takes a [`Listener`], and the caller decides what becomes of it.

/// Is told what goes on. Every method does nothing unless it is written, so that a caller writes
/// only those that it wants.
///
/// ```
/// use performer_lm::listener::{Bar, Listener, Unit};
///
/// /// Prints the loss of every step.
/// struct Losses;
///
/// impl Listener for Losses {
///     fn begin(&self, _name: &str, _unit: Unit, _done: u64, _total: u64) -> Box<dyn Bar + '_> {
///         Box::new(Losses)
///     }
/// }
///
/// impl Bar for Losses {
///     fn step(&self, number: usize, loss: f64, _tokens_per_second: f64) {
///         println!("step {number}: {loss}");
///     }
/// }
/// ```
pub trait Listener: Sync {
    /// Something that a person should know: what was taken instead of what was asked for, the loss
    /// of a validation, a warning.
    fn note(&self, text: &str) {
        let _ = text;
    }

    /// Work of a known size begins, of which `done` is done already, both counted in `unit`. The
    /// work ends when the returned [`Bar`] is dropped.
    fn begin(&self, name: &str, unit: Unit, done: u64, total: u64) -> Box<dyn Bar + '_> {
        let _ = (name, unit, done, total);
        Box::new(Silent)
    }
}

/// What the size of some work is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes of a text or a file.
    Bytes,
    /// Optimiser steps. A program that ended while such work lasts would lose what was learned
    /// since the last save; it sets the training's flag to stop instead, at which the training
    /// looks after every step, and saves.
    Steps,
    /// Layers of a model.
    Layers,
    /// Texts that a model reads while it is measured.
    Texts,
}

/// Is told how far some work has come.
pub trait Bar {
    /// So much of the total is done.
    fn advance(&self, done: u64) {
        let _ = done;
    }

    /// An optimiser step was taken: its number, counted from 1, the loss of its batch, and the
    /// tokens that are trained on in a second.
    fn step(&self, number: usize, loss: f64, tokens_per_second: f64) {
        let _ = (number, loss, tokens_per_second);
    }

    /// The model was validated between two steps: the number of steps taken, and the mean loss over
    /// held-out tokens, in nats. What comes after the last step is in the report of the training.
    fn validation(&self, number: usize, loss: f64) {
        let _ = (number, loss);
    }
}

/// Writes a speed of training with its unit: `38 tokens/s`, `1.5k tokens/s`.
pub(crate) fn show_speed(tokens_per_second: f64) -> String {
    if tokens_per_second < 999.5 {
        format!("{tokens_per_second:.0} tokens/s")
    } else {
        format!("{:.1}k tokens/s", tokens_per_second / 1000.0)
    }
}

/// Does nothing with what it is told.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Listener for Silent {}

impl Bar for Silent {}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Mutex;

    use super::Listener;

    #[test]
    fn slow_trainings_have_a_speed_too() {
        let shown = [0.4, 38.2, 999.4, 999.5, 1_000.0, 83_300.0].map(super::show_speed);
        let numbers = shown.each_ref().map(|speed| speed.strip_suffix(" tokens/s").expect("the unit"));
        assert_eq!(numbers, ["0", "38", "999", "1.0k", "1.0k", "83.3k"]);
    }

    /// Keeps the notes that it is told, one after the other.
    #[derive(Default)]
    pub(crate) struct Told(pub(crate) Mutex<String>);

    impl Listener for Told {
        fn note(&self, text: &str) {
            self.0.lock().unwrap().push_str(text);
        }
    }

    impl Told {
        pub(crate) fn all(self) -> String {
            self.0.into_inner().unwrap()
        }
    }
}
