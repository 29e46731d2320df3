//! What goes wrong and is mended by a setting that the caller has. The library says what is wrong
//! in its own terms; a command line finds the [`Cause`] in the error and says which option helps.

use std::fmt;

/// Why something failed, in an [`anyhow::Error`]: `error.downcast_ref::<Cause>()`.
#[derive(Clone, Debug, PartialEq)]
pub enum Cause {
    /// A setting is out of its range.
    Setting {
        /// What the setting is a part of, such as `model config`; empty for a part of nothing.
        of: &'static str,
        /// Its name as the configuration and the library have it, such as `batch_size`.
        name: &'static str,
        /// What it is.
        value: String,
        /// What it must be, in words.
        must: String,
    },
    /// The memory of the device ran out.
    OutOfMemory {
        /// Bytes that are free, and bytes in all, where the device says so.
        free: Option<(usize, usize)>,
        /// What should be less, in words.
        lower: String,
        /// Whether it ran out in a training step, whose size is the caller's choice.
        in_training: bool,
    },
    /// The values of a training are no longer finite: its learning rate is too high.
    Diverged {
        /// The training: `training`, the stage of a conversion, or a task with its attention.
        training: String,
        /// The step, counted from 1.
        step: usize,
        /// The loss of its batch, where that is known.
        loss: Option<f64>,
    },
    /// A folder holds what belongs to something else, as the text says.
    AnotherFolder(String),
    /// A folder holds files that would be replaced, as the text says.
    WouldReplace(String),
    /// The work was stopped from outside and can go on, as the text says.
    Stopped(String),
    /// The device asked for cannot be had, as the text says.
    Device(String),
    /// The data asked for cannot be had, as the text says.
    Data(String),
    /// A run began with other data than it is to go on with, as the text says.
    OtherData(String),
}

impl Cause {
    /// A [`Self::Setting`] of this value.
    pub(crate) fn setting(
        of: &'static str,
        name: &'static str,
        value: impl fmt::Display,
        must: impl fmt::Display,
    ) -> Self {
        Self::Setting { of, name, value: value.to_string(), must: must.to_string() }
    }
}

/// Refuses a list in which something is given twice; `what` names one of its items.
///
/// # Errors
/// With the first that is given again.
#[cfg(feature = "lab")]
pub(crate) fn require_once<T: PartialEq + fmt::Display>(what: &str, items: &[T]) -> anyhow::Result<()> {
    for (i, item) in items.iter().enumerate() {
        anyhow::ensure!(!items[..i].contains(item), "{what} {item} is given twice");
    }
    Ok(())
}

/// What [`Cause::Stopped`] says of work that the same command takes up again.
#[cfg(feature = "lab")]
pub(crate) const STOPPED: &str = "stopped; the same command goes on from here";

/// What [`Cause::Stopped`] says of work without a folder, of which nothing is kept.
#[cfg(feature = "lab")]
pub(crate) const STOPPED_FOR_GOOD: &str = "stopped; nothing was kept, since no folder was given";

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Setting { of: "", name, value, must } => write!(f, "{name} is {value}; it must be {must}"),
            Self::Setting { of, name, value, must } => write!(f, "{of}: {name} is {value}; it must be {must}"),
            Self::OutOfMemory { free, lower, .. } => {
                f.write_str("the device's memory ran out")?;
                if let Some((free, all)) = free {
                    write!(f, " ({} of {} MiB are free)", free >> 20, all >> 20)?;
                }
                write!(f, ": lower {lower}")
            }
            Self::Diverged { training, step, loss } => {
                write!(f, "{training}, step {step}")?;
                if let Some(loss) = loss {
                    write!(f, ", loss {loss}")?;
                }
                f.write_str(" failed: values are not finite; lower the learning rate")
            }
            Self::AnotherFolder(text)
            | Self::WouldReplace(text)
            | Self::Stopped(text)
            | Self::Device(text)
            | Self::Data(text)
            | Self::OtherData(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Cause {}
