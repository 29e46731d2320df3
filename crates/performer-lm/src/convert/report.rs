//! The report of a conversion: what each stage came to, and the chart of it.

use serde::{Deserialize, Serialize};

use super::Measured;
#[cfg(feature = "plot")]
use crate::plot::{At, Axis, Chart, Marker, Scale, Series};
use crate::train::{Leg, RunKey};

/// A `Point` is a measurement of the student during a stage.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Number of tokens seen in the stage so far.
    pub tokens: u64,
    /// Loss on held-out text, in nats per token.
    pub val_loss: f64,
}

/// A `Stage` describes a finished stage and its result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stage {
    /// `teacher`, `swap` (the new attention, untrained), `calibrate`, `transfer`, `tune`, or
    /// `control`.
    pub name: String,
    /// Number of tokens that the student had seen in all stages when this one was done; for the
    /// control, those of its own fine-tuning.
    pub tokens: u64,
    /// Seconds that the stage took.
    pub seconds: f64,
    /// The student after the stage, measured on held-out text.
    #[serde(flatten)]
    pub measured: Measured,
    /// The student with the exact windows before its features switched off, if it has any, which
    /// shows what the features do alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without_window: Option<Measured>,
    /// The student with its features off, which shows what they add to its windows, or to means of
    /// the values where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features_off: Option<Measured>,
    /// The student during the stage, where it was measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<Point>,
}

/// A `Report` describes the results of a conversion; it is saved as `convert.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The attention of the student
    /// ([`ModelConfig::attention_text`](crate::config::ModelConfig::attention_text)).
    pub attention_spec: String,
    /// Name of the corpus.
    pub corpus: String,
    /// Number of held-out tokens measured on.
    pub measured_tokens: usize,
    /// Name of the second text, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_corpus: Option<String>,
    /// The stages in order, the teacher first.
    pub stages: Vec<Stage>,
    /// The teacher after the same fine-tuning, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub control: Option<Stage>,
    /// Revision of this program.
    pub revision: String,
    /// Key of the student and of the stages so far; `None` in reports of versions that did not
    /// record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<RunKey>,
    /// The parts that other revisions of this program made, or that were made on other kinds of
    /// device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier_legs: Vec<Leg>,
}

#[cfg(feature = "plot")]
impl Report {
    /// Draws loss against tokens used, with the teacher's loss as a line.
    pub fn chart(&self) -> Chart {
        let millions = |tokens: u64| tokens as f64 / 1e6;
        let students: Vec<&Stage> = self.stages.iter().filter(|stage| stage.name != "teacher").collect();
        let (mut curve, mut begun) = (Vec::new(), 0);
        for stage in &students {
            curve.extend(stage.points.iter().map(|p| (millions(begun + p.tokens), p.val_loss)));
            curve.push((millions(stage.tokens), stage.measured.held_out.val_loss));
            begun = stage.tokens;
        }
        let mut series = vec![Series::new("student", curve)];
        if let Some(control) = &self.control {
            let ends = (millions(control.tokens), control.measured.held_out.val_loss);
            let points = control.points.iter().map(|p| (millions(p.tokens), p.val_loss)).chain([ends]);
            series.push(Series::new("teacher, fine-tuned in the same way", points));
        }
        let bare: Vec<(f64, f64)> = students
            .iter()
            .filter_map(|s| Some((millions(s.tokens), s.without_window.as_ref()?.held_out.val_loss)))
            .collect();
        if !bare.is_empty() {
            series.push(Series::new("student, window off", bare));
            let off =
                students.iter().filter_map(|s| Some((millions(s.tokens), s.features_off.as_ref()?.held_out.val_loss)));
            series.push(Series::new("student, features off", off));
        }
        let ends = students.iter().filter(|stage| matches!(&stage.name[..], "transfer" | "tune"));
        let teacher = self.stages.iter().find(|stage| stage.name == "teacher");
        let teacher = teacher.map(|t| Marker { at: At::Y(t.measured.held_out.val_loss), label: "teacher".into() });
        let stages: Vec<&str> = students.iter().map(|stage| &stage.name[..]).collect();
        Chart {
            title: format!("Converting to {}", self.attention_spec),
            subtitle: Some(format!(
                "stages: {}; {} held-out tokens of {}",
                stages.join(", "),
                self.measured_tokens,
                self.corpus
            )),
            x: Axis::new("tokens seen (millions)", Scale::Linear),
            y: Axis::new("loss (nats per token)", Scale::Linear),
            series,
            lines: ends
                .map(|stage| Marker { at: At::X(millions(stage.tokens)), label: format!("{} ends", stage.name) })
                .chain(teacher)
                .collect(),
        }
    }
}
