//! This module is the command `performer-lm convert`.

use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use anyhow::{Context, Result, bail, ensure};
use performer_core::FavorConfig;

use super::{
    args::{Machine, held_out, require_another_folder},
    output::{self, recall_cells},
};
use crate::{
    config::{AttentionConfig, AttentionPattern, Positions},
    convert::{Costs, HeadReport, Measured, Plan, Report, Second, Stage, Tuning, costs, inspect, run as convert},
    data::{DataSpec, prepare_for},
    errors::Cause,
    eval::show_perplexity,
    model::pretrained::Pretrained,
    plot,
    recall::Examiner,
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm convert runs/small-softmax-seed42 --data stories/ --out runs/converted
  performer-lm convert stories260K.bin --attention favor:m=64,map=learned,window=32 --data stories/ --out runs/converted
  performer-lm convert models/stories/softmax --attention favor:m=128,map=learned,gate,conv --data stories/ --out runs/gated
  performer-lm convert SmolLM2-135M.gguf --layer 0,29=softmax --context 256 --data book.txt --out runs/smol
  performer-lm convert SmolLM2-135M.gguf --layer-costs --attention softmax:window=64,sinks=4 --data book.txt
  performer-lm convert small.gguf --attention softmax:window=64 --tune-steps 500 --out runs/window  a window alone
  performer-lm convert stories260K.bin --inspect --data stories/")]
pub(super) struct Args {
    /// The softmax model: checkpoint folder, Hugging Face folder or hub id, llama2.c .bin, or .gguf
    /// file.
    model: String,
    /// What its attention becomes. A+B/n, as in favor-window+softmax/4, makes it B in every n-th
    /// layer and A in the others.
    #[arg(long, default_value = "favor:m=64,map=learned,window=32,sinks=4")]
    attention: AttentionPattern,
    /// Layers with an attention of their own, counted from 0, such as 0,29=softmax; give it several
    /// times for several attentions.
    #[arg(long, value_name = "LAYERS=ATTENTION", value_parser = layers)]
    layer: Vec<(Vec<usize>, AttentionConfig)>,
    /// Text to convert on: auto, tinystories, sample, a text file, or a folder with train.txt and
    /// valid.txt.
    #[arg(long)]
    data: Option<DataSpec>,
    /// Folder of the converted model. Run the same command again to go on after a stop.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Begin anew, and replace what the folder holds.
    #[arg(long)]
    overwrite: bool,
    /// Tokens of a training sequence, which become the context in the converted model's config
    /// [default: the model's context, at most 512 unless its positions are learned].
    #[arg(long)]
    context: Option<usize>,
    /// Tokens that features are fitted to. Forget gates are fitted to the distances at which the
    /// teacher looks in four sequences; 0 leaves features random and gates open [default: 32768
    /// where there are any].
    #[arg(long)]
    calibrate_tokens: Option<usize>,
    /// Bring queries and keys to the same covariance before features are fitted to them, which
    /// costs one matrix product more for every key.
    #[arg(long)]
    balance: bool,
    /// Steps that train feature maps and forget gates to return what softmax returns; 0 for none
    /// [default: 300 where they can be trained].
    #[arg(long)]
    transfer_steps: Option<usize>,
    /// Peak learning rate of the steps that train feature maps and forget gates [default: 1e-2].
    #[arg(long)]
    transfer_rate: Option<f64>,
    /// Share of the steps of both trainings, from 0 to 1, in which the windows before features are
    /// switched off, so that features learn what they would leave to the windows.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    drop_window: f64,
    /// Steps of fine-tuning after the transfer: all weights, feature maps that can be trained, and
    /// forget gates.
    #[arg(long, default_value_t = 0)]
    tune_steps: usize,
    /// Peak learning rate of fine-tuning [default: 3e-4].
    #[arg(long)]
    tune_rate: Option<f64>,
    /// Train factors of this rank beside the matrices in place of all weights; they are merged at
    /// the end.
    #[arg(long, value_name = "RANK")]
    adapters: Option<usize>,
    /// Times that the student is measured on the way of each stage of training, for the curve.
    #[arg(long, default_value_t = Plan::POINTS)]
    points: usize,
    /// Fine-tune the teacher in the same way, too: it shows how much of the student's gain is due
    /// to fine-tuning alone.
    #[arg(long)]
    control: bool,
    /// Share of the teacher's distribution in the loss of fine-tuning, from 0 to 1; the next token
    /// has the rest [default: half].
    #[arg(long)]
    distillation: Option<f64>,
    /// Sequences of a step.
    #[arg(long, default_value_t = Plan::BATCH_SIZE)]
    batch_size: usize,
    /// Held-out tokens that every stage is measured on; with --layer-costs, tokens of the training
    /// text.
    #[arg(long, default_value_t = Plan::MEASURE_TOKENS)]
    measure_tokens: usize,
    /// A second text that every stage is measured on, of another kind than that of --data: a text
    /// file, or the held-out part of sample, tinystories or a folder.
    #[arg(long, value_name = "TEXT")]
    second: Option<String>,
    /// Lengths, in tokens, of texts in which every stage has to find a pass key and pairs of tokens
    /// again; 0 for none. Linear attention and windows may keep the loss and lose this [default:
    /// 256,1024 where the text and the model allow it].
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    recall: Option<Vec<usize>>,
    /// Seed of features and data order.
    #[arg(long, default_value_t = Plan::SEED)]
    seed: u64,
    /// Convert nothing: report how sharp each head is, and how well features would do in it.
    #[arg(long, conflicts_with_all = ["layer", "out", "overwrite", "transfer_steps", "transfer_rate", "drop_window", "tune_steps",
        "tune_rate", "adapters", "distillation", "points", "control", "batch_size", "measure_tokens", "second", "recall"])]
    inspect: bool,
    /// Convert nothing: report what the conversion of each layer alone costs, with nothing trained,
    /// on the training text. Those that cost most are worth leaving exact.
    #[arg(long, conflicts_with_all = ["inspect", "out", "overwrite", "transfer_steps", "transfer_rate",
        "drop_window", "tune_steps", "tune_rate", "adapters", "distillation", "points", "control", "batch_size", "second",
        "calibrate_tokens", "balance"])]
    layer_costs: bool,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

/// Default lengths of texts in which recall is measured, in tokens.
const RECALL: [usize; 2] = [256, 1024];

/// Name of the chart in the folder of a conversion.
const CHART: &str = "convert";

fn layers(text: &str) -> Result<(Vec<usize>, AttentionConfig), String> {
    let (layers, attention) = text.split_once('=').ok_or("give LAYERS=ATTENTION, such as 0,29=softmax")?;
    let number =
        |layer: &str| layer.parse().map_err(|_| format!("'{layer}' is no layer: they are counted 0, 1, 2, ..."));
    Ok((layers.split(',').map(number).collect::<Result<_, _>>()?, attention.parse()?))
}

impl Args {
    /// Refuses options that contradict each other, or do nothing beside the others.
    fn check(&self) -> Result<()> {
        for (option, value) in [("--batch-size", self.batch_size), ("--measure-tokens", self.measure_tokens)] {
            ensure!(value > 0, "{option} is 0; it must be at least 1");
        }
        if self.inspect {
            ensure!(self.calibrate_tokens != Some(0), "--inspect fits features to --calibrate-tokens; give at least 1");
            self.inspected()?;
        }
        ensure!(self.adapters != Some(0), "--adapters is 0; it is a rank of at least 1, and 8 is usual");
        if let Some(share) = self.distillation {
            ensure!((0.0..=1.0).contains(&share), "--distillation is {share}; it is a share, from 0 to 1");
        }
        let of_tuning = [
            ("--control", self.control),
            ("--adapters", self.adapters.is_some()),
            ("--distillation", self.distillation.is_some()),
            ("--tune-rate", self.tune_rate.is_some()),
        ];
        if let Some((option, _)) = of_tuning.iter().find(|(_, given)| *given && self.tune_steps == 0) {
            bail!(
                "{option} belongs to fine-tuning, which takes no steps here: give --tune-steps too, or leave {option} out"
            );
        }
        let mut given: Vec<usize> = self.layer.iter().flat_map(|(layers, _)| layers.clone()).collect();
        given.sort();
        if let Some(layer) = given.windows(2).find(|two| two[0] == two[1]) {
            bail!("--layer gives layer {} an attention twice; give each layer once", layer[0]);
        }
        Ok(())
    }

    /// Returns the features that `--inspect` looks at.
    fn inspected(&self) -> Result<&FavorConfig> {
        ensure!(
            self.attention.other.is_none(),
            "--inspect looks at one attention for all layers, such as --attention favor:m=64"
        );
        let [one] = self.attention.most.by_head() else {
            bail!("--inspect looks at one attention for all heads, such as --attention favor:m=64")
        };
        let parts = self.attention.most.parts();
        ensure!(
            parts.key_dim.is_none() && !parts.mup_scale && !parts.output_norm,
            "--inspect looks at the queries and keys of the softmax model as they are: leave key-dim, mup-scale and \
             output-norm out"
        );
        one.favor().context("--inspect needs --attention favor:...")
    }

    /// Returns the folder of the converted model, in which nothing of others may stand; an empty
    /// path where nothing is written.
    fn folder(&self) -> Result<&Path> {
        if self.inspect || self.layer_costs {
            return Ok(Path::new(""));
        }
        let Some(out) = self.out.as_deref() else {
            bail!("give the converted model's folder by --out (or --inspect, or --layer-costs)")
        };
        require_another_folder(&self.model, out)?;
        plot::require_own(&out.join(CHART))?;
        Ok(out)
    }
}

pub(super) fn run(args: Args, machine: &Machine, stop: &AtomicBool) -> Result<()> {
    args.check()?;
    let out = args.folder()?;
    let mut teacher = Pretrained::open_with(&args.model, &output::TERMINAL)?;
    teacher.set_context(args.context, 512)?;
    let mut config = teacher.config.clone().with_attention(&args.attention)?;
    for (layers, attention) in &args.layer {
        if let Some(layer) = layers.iter().find(|layer| **layer >= config.layers) {
            bail!("--layer names layer {layer}; the model has {} layers, counted from 0", config.layers);
        }
        config.attention_by_layer.extend(layers.iter().map(|&layer| (layer, attention.clone())));
    }
    // What a layer is given here may be what a stage changes, so this comes after it.
    let defaults = Plan::new(&teacher, config, out);
    let calibrate = args.calibrate_tokens.unwrap_or(defaults.calibrate_tokens);
    let transfer = args.transfer_steps.unwrap_or(defaults.transfer_steps);
    ensure!(
        !args.balance || calibrate > 0,
        "--balance belongs to the fitting of features, which reads no tokens here: leave it out, or give --calibrate-tokens"
    );
    ensure!(
        transfer > 0 || args.transfer_rate.is_none(),
        "--transfer-rate belongs to the transfer, which takes no steps here: leave it out, or give --transfer-steps"
    );
    ensure!(
        transfer > 0 || args.tune_steps > 0 || args.drop_window == 0.0,
        "--drop-window belongs to training, which takes no steps here: leave it out, or give --transfer-steps or --tune-steps"
    );
    let spec = args.data.clone().unwrap_or_default();
    let data = prepare_for(&spec, &teacher.tokenizer, &output::TERMINAL).context("cannot prepare the text")?;
    output::note(&format!("converting on {}", data.description));
    if args.inspect {
        let model = teacher.decoder(&machine.device)?;
        let calibrate = args.calibrate_tokens.unwrap_or(Plan::CALIBRATE_TOKENS);
        let heads = inspect(&model, &data, args.inspected()?, args.balance, calibrate, args.seed)?;
        return if args.json {
            output::json(&heads)
        } else {
            output::result(&inspection(&heads, &args.attention.most))
        };
    }
    if let Some(second) = args.second.as_deref().filter(|second| spec.trains_on(Path::new(second))) {
        output::note(&format!(
            "warning: the conversion learns from {second} or a part of it, and all of it is measured as \
             the second text: give another one"
        ));
    }
    let second = args.second.as_deref().map(|text| held_out(text, &teacher.tokenizer)).transpose()?;
    let second = second.as_ref().map(|(name, tokens)| Second { name, tokens });
    let recall = match &args.recall {
        Some(lengths) => lengths.iter().copied().filter(|&tokens| tokens > 0).collect(),
        None => {
            let (tokenizer, listener) = (&teacher.tokenizer, &output::TERMINAL);
            let text = if args.layer_costs { &data.train } else { &data.valid };
            let examiner = Examiner { tokenizer, text, threads: machine.threads, listener };
            // Learned positions end with the context; rotary ones do not.
            let config = &defaults.config;
            let positions = if config.positions == Positions::Learned { config.context } else { usize::MAX };
            RECALL.into_iter().filter(|&tokens| tokens <= positions && examiner.check(tokens).is_ok()).collect()
        }
    };
    let tuning = Tuning::new(args.tune_steps);
    let tuning = Tuning {
        rate: args.tune_rate.unwrap_or(tuning.rate),
        distillation: args.distillation.unwrap_or(tuning.distillation),
        adapters: args.adapters,
        ..tuning
    };
    let plan = Plan {
        overwrite: args.overwrite,
        device: machine.device.clone(),
        threads: machine.threads,
        stop,
        calibrate_tokens: calibrate,
        balance: args.balance,
        transfer_steps: transfer,
        transfer_rate: args.transfer_rate.unwrap_or(defaults.transfer_rate),
        drop_window: args.drop_window,
        batch_size: args.batch_size,
        tuning: (tuning.steps > 0).then_some(tuning),
        control: args.control,
        measure_tokens: args.measure_tokens,
        second,
        recall,
        points: args.points,
        seed: args.seed,
        data: Some(&spec),
        listener: &output::TERMINAL,
        ..defaults
    };
    if args.layer_costs {
        let costs = costs(&plan, &data)?.ok_or_else(|| Cause::Stopped("stopped; nothing was kept".into()))?;
        return if args.json {
            output::json(&costs)
        } else {
            output::result(&cost_table(&costs, &plan.recall, &args.layer))
        };
    }
    let report = convert(&plan, &data)?;
    let Some(report) = report else {
        let again = if args.overwrite { "the same command without --overwrite" } else { "the same command" };
        bail!(Cause::Stopped(format!("stopped; {again} goes on from here")));
    };
    report.chart().save(&out.join(CHART))?;
    output::note(&format!("saved in {}", out.display()));
    let losses: Vec<f64> = report.stages.iter().map(|stage| stage.measured.held_out.val_loss).collect();
    if args.tune_steps > 0 && report.control.is_none() && losses.last().is_some_and(|last| *last < losses[0]) {
        output::note(
            "the student ends below its teacher, which was not trained further: --control trains it in \
             the same way, and shows both",
        );
    }
    if args.json { output::json(&report) } else { output::result(&table(&report)) }
}

fn table(report: &Report) -> String {
    let teacher = report.stages.first().map_or(f64::NAN, |stage| stage.measured.held_out.val_loss);
    let stages = || report.stages.iter().chain(&report.control);
    let name = |stage: &Stage| if stage.name == "control" { "teacher, tuned".into() } else { stage.name.clone() };
    let windows = report.stages.iter().any(|stage| stage.without_window.is_some());
    let loss = |of: Option<&Measured>| of.map_or_else(String::new, |m| format!("{:.4}", m.held_out.val_loss));
    let rows: Vec<Vec<String>> = stages()
        .map(|stage| {
            let m = &stage.measured.held_out;
            let mut row = vec![
                name(stage),
                output::thousands(stage.tokens),
                format!("{:.4}", m.val_loss),
                format!("{:+.4}", m.val_loss - teacher),
                show_perplexity(m.perplexity, 2),
                format!("{:.1}%", 100.0 * m.top1_agreement),
                format!("{:.0}", stage.seconds),
            ];
            if windows {
                row.push(loss(stage.without_window.as_ref()));
            }
            row.push(loss(stage.features_off.as_ref()));
            if report.second_corpus.is_some() {
                row.push(stage.measured.second.map_or_else(String::new, |second| format!("{:.4}", second.val_loss)));
            }
            row
        })
        .collect();
    let mut header = vec!["stage", "tokens so far", "loss", "to teacher", "perplexity", "same top-1", "seconds"];
    if windows {
        header.push("window off");
    }
    header.push("features off");
    let mut texts = report.corpus.clone();
    if let Some(second) = &report.second_corpus {
        header.push("second text");
        texts += &format!("; second text: {second}");
    }
    let losses = format!("{}\n\n{}: {texts}", output::table(&header, &rows), report.attention_spec);
    let rows: Vec<Vec<String>> = stages()
        .flat_map(|stage| {
            let off = stage.features_off.as_ref().map_or(&[][..], |off| &off.recall);
            stage.measured.recall.iter().enumerate().map(move |(i, recall)| {
                let tokens = output::thousands(recall.tokens as u64);
                let off = off.get(i).map_or_else(Default::default, recall_cells);
                [[name(stage), tokens], recall_cells(recall), off].concat()
            })
        })
        .collect();
    if rows.is_empty() {
        return losses;
    }
    let header = ["recall after", "over tokens", "pass keys", "pairs", "features off: pass keys", "pairs"];
    format!("{losses}\n\n{}\n\nrecall: share found again (nats/token)", output::table(&header, &rows))
}

/// Shows the layers in the order of what they cost, and how to keep the half exact that costs most,
/// beside what the `--layer` options say of the others.
fn cost_table(costs: &Costs, recall: &[usize], given: &[(Vec<usize>, AttentionConfig)]) -> String {
    let row = |name: String, cost: String, measured: &Measured| {
        let losses = [name, cost, format!("{:.4}", measured.held_out.val_loss)];
        losses.into_iter().chain(measured.recall.iter().flat_map(recall_cells)).collect::<Vec<_>>()
    };
    let layers = costs.by_cost();
    let mut rows = vec![row("none".into(), String::new(), &costs.teacher)];
    rows.extend(layers.iter().map(|of| row(of.layer.to_string(), format!("{:+.4}", of.cost), &of.measured)));
    let mut header = vec!["layer converted".to_string(), "cost".into(), "loss".into()];
    for &tokens in recall {
        let tokens = output::thousands(tokens as u64);
        header.extend([format!("pass keys, {tokens}"), format!("pairs, {tokens}")]);
    }
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let most: Vec<usize> = layers[..layers.len() / 2].iter().map(|of| of.layer).collect();
    let hint = match most.is_empty() {
        true => String::new(),
        false => format!("\nto keep the half exact that costs most: {}", exact_too(&most, given)),
    };
    format!(
        "{}\n\n{}: {}\ncost: nats/token lost on the training text, and on pass keys and pairs where the \
         teacher finds any; recall: share found again (nats/token){hint}",
        output::table(&header, &rows),
        costs.attention_spec,
        costs.corpus
    )
}

/// Writes the `--layer` options that keep some layers exact, and leave others what they are given.
fn exact_too(layers: &[usize], given: &[(Vec<usize>, AttentionConfig)]) -> String {
    let mut exact = layers.to_vec();
    let mut options = Vec::new();
    for (of, attention) in given {
        let others: Vec<usize> = of.iter().copied().filter(|layer| !layers.contains(layer)).collect();
        match attention {
            AttentionConfig::Softmax => exact.extend(others),
            _ if others.is_empty() => {}
            other => options.push((others, other.to_string())),
        }
    }
    exact.sort();
    options.push((exact, AttentionConfig::Softmax.to_string()));
    let option = |(layers, attention): &(Vec<usize>, String)| {
        let layers: Vec<String> = layers.iter().map(usize::to_string).collect();
        format!("--layer {}={attention}", layers.join(","))
    };
    options.iter().map(option).collect::<Vec<_>>().join(" ")
}

fn inspection(heads: &[HeadReport], attention: &AttentionConfig) -> String {
    // A map without random rows has no number of them to look for.
    let has_number = attention.favor().is_some_and(|favor| favor.map.is_random());
    let rows: Vec<Vec<String>> = heads
        .iter()
        .map(|h| {
            vec![
                h.layer.to_string(),
                h.head.to_string(),
                format!("{:.2}", h.logit_deviation),
                format!("{:.3}", h.row_total_variation),
                format!("{:.3}", h.uniform_total_variation),
                format!("{:.3}", h.output_error),
                match h.suggested_features {
                    Some(m) => format!("m={m}"),
                    None if has_number => "softmax".into(),
                    None => "–".into(),
                },
            ]
        })
        .collect();
    let header = ["layer", "head", "logit sd", "row TV", "uniform TV", "output error", "row TV < 0.15 by"];
    format!("{}\n\nfeatures of {attention}, without a window, fitted where they can be", output::table(&header, &rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_keeps_what_layers_were_given() {
        let (softmax, uniform) = (AttentionConfig::Softmax, AttentionConfig::Uniform);
        assert_eq!(exact_too(&[3, 1], &[]), "--layer 1,3=softmax");
        assert_eq!(exact_too(&[3], &[(vec![0], softmax.clone())]), "--layer 0,3=softmax");
        let given = [(vec![0, 2], uniform), (vec![1], softmax)];
        assert_eq!(exact_too(&[0], &given), "--layer 2=uniform --layer 0,1=softmax");
        assert_eq!(exact_too(&[0, 2], &given), "--layer 0,1,2=softmax");
    }

    #[test]
    fn several_layers_are_given_one_attention() {
        assert_eq!(layers("0,29=softmax"), Ok((vec![0, 29], AttentionConfig::Softmax)));
        for (text, error) in
            [("softmax", "0,29=softmax"), ("0,x=softmax", "'x' is no layer"), ("=softmax", "'' is no layer")]
        {
            let said = layers(text).unwrap_err();
            assert!(said.contains(error), "{text}: {said}");
        }
    }
}
