use candle_core::{Device, Tensor};
use performer_lm::{config::*, data::*, model::*, train::*};
use std::time::Instant;
#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;
fn main() -> anyhow::Result<()> {
    unsafe { std::env::set_var("RAYON_NUM_THREADS", "1") };
    let args: Vec<String> = std::env::args().collect();
    let att: AttentionConfig = args[1].parse().map_err(anyhow::Error::msg)?;
    let threads: usize = args[2].parse()?;
    let steps: usize = args[3].parse()?;
    let micro: usize = args[4].parse()?;
    let data = prepare(&DataSpec::Path("/work/shared/data/tinystories".into()), 4096, None)?;
    let (mut mc, tc) = Preset::Seed.load()?;
    mc.attention = att;
    mc.vocab_size = data.tokenizer.vocab_size();
    let model = Decoder::new(&mc, 42, &Device::Cpu)?;
    println!("params {}", model.parameter_count()?);
    let batches = Batches::new(data.train.clone(), mc.context, tc.batch_size, 42)?;
    let total = batches.batches_per_epoch() * 2;
    println!("train tokens {} valid {} steps {total}", data.train.len(), data.valid.len());
    let params = model.named_parameters()?;
    let mut opt = AdamW::new(params.clone(), tc.optimizer.clone())?;
    let t0 = Instant::now();
    for step in 0..steps {
        let b = batches.batch((step / batches.batches_per_epoch()) as u64, step % batches.batches_per_epoch())?;
        let n = b.rows.div_ceil(micro);
        let mut sum: Option<Gradients> = None;
        let mut loss = 0f64;
        in_order(
            n,
            threads,
            |i| {
                let r0 = i * micro;
                let r1 = (r0 + micro).min(b.rows);
                let ids =
                    Tensor::from_slice(&b.inputs[r0 * b.context..r1 * b.context], (r1 - r0, b.context), &Device::Cpu)?;
                let logits = model.forward(&ids, None)?;
                let l = (cross_entropy(&logits.flatten_to(1)?, &b.targets[r0 * b.context..r1 * b.context])?
                    .sum_all()?
                    / (b.inputs.len() as f64))?;
                let g = l.backward()?;
                Ok((f64::from(l.to_scalar::<f32>()?), Gradients::from_store(&g, &params)?))
            },
            |(l, g)| {
                loss += l;
                match &mut sum {
                    None => sum = Some(g),
                    Some(s) => s.add(g)?,
                }
                Ok(())
            },
        )?;
        let lr = tc.schedule.lr(tc.learning_rate, step, total);
        let norm = opt.step(&sum.unwrap(), lr, tc.clip)?;
        if step % 20 == 0 || step + 1 == steps {
            println!(
                "step {step} loss {loss:.4} norm {norm:.3} lr {lr:.2e} tok/s {:.0}",
                ((step + 1) * b.inputs.len()) as f64 / t0.elapsed().as_secs_f64()
            );
        }
    }
    let e = performer_lm::eval::evaluate(&model, &data.valid, threads)?;
    println!("val {:.4} ppl {:.3} bpb {:.4}", e.val_loss, e.perplexity, e.bits_per_byte);
    Ok(())
}
