//! Foreign and corrupt input: files of every kind that the program reads are mutated at random, and
//! whatever comes of it is read or refused, without a panic, and without memory for what a header
//! only claims.
//!
//! `MUTATIONS=12500 cargo test --release -p performer-lm --test suite mutations::` mutates each of
//! the files so many times (`just attack-files` does); without it, a hundred times.

use std::{
    any::Any,
    collections::BTreeMap,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::LazyLock,
};

use anyhow::{Result, bail, ensure};
use candle_core::{Device, Tensor};
use performer_core::{AttentionConfig, State};
use performer_lm::{
    config::{AttentionPattern, ModelConfig, Schedule},
    data::{Corpus, DataSpec, TokenFile, Tokenizer},
    generate::{Sampling, generate},
    listener::Silent,
    model::pretrained::Pretrained,
    train::{Checkpoint, TrainingState, read_log, saved_data},
};

use super::{
    heap::peak,
    pretrained::{
        gguf, llama2c,
        support::{SMALL, llama_config, llama_weights, word_tokenizer, write_folder, write_json},
    },
    program::{SHORT, performer},
};

/// How often each file is mutated.
static MUTATIONS: LazyLock<u64> = LazyLock::new(|| {
    std::env::var("MUTATIONS").ok().map_or(100, |count| count.parse().expect("MUTATIONS is a number"))
});

/// The most memory that reading a file may take: this, and so many times the length of all files
/// beside it. A model that is built has a table of angles of 32,768 positions.
const MEMORY: (usize, usize) = (48 << 20, 64);

/// `Random` draws numbers; splitmix64 (Steele et al. 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, or 0.
    fn below(&mut self, end: usize) -> usize {
        if end == 0 { 0 } else { (self.next() % end as u64) as usize }
    }

    /// A place in `length` bytes: half of them in the first thousand, where headers are.
    fn place(&mut self, length: usize) -> usize {
        if self.below(2) == 0 { self.below(length.min(1000)) } else { self.below(length) }
    }

    fn one_of<'a, T: ?Sized>(&mut self, all: &[&'a T]) -> &'a T {
        all[self.below(all.len())]
    }
}

/// Numbers that a reader may not expect.
const NUMBERS: [u64; 16] = [
    0,
    1,
    2,
    7,
    0x7f,
    0xff,
    0xffff,
    1 << 20,
    1_000_000_000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 40,
    1 << 62,
    1 << 63,
    u64::MAX,
];

/// What may stand in a text in place of a number or a word.
const WORDS: [&str; 24] = [
    "0",
    "-1",
    "1",
    "3",
    "1e308",
    "-1e308",
    "1e-308",
    "1e999",
    "0.5",
    "16777216",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "1e19",
    "null",
    "true",
    "false",
    "[]",
    "{}",
    "\"\"",
    "\"x\"",
    "[[[[]]]]",
    "\"\\ud800\"",
];

/// Changes bytes in one to four ways.
fn mutate(random: &mut Random, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            bytes.push(random.next() as u8);
        }
        let at = random.place(bytes.len());
        let some = |random: &mut Random| 1 + random.below(40.min(bytes.len() - at));
        match random.below(10) {
            0 | 1 => bytes[at] ^= 1 << random.below(8),
            2 => bytes[at] = random.next() as u8,
            3 => bytes.truncate(at),
            4 => {
                let count = some(random);
                bytes.drain(at..at + count);
            }
            5 => {
                let count = some(random);
                let copy = bytes[at..at + count].to_vec();
                let to = random.place(bytes.len());
                bytes.splice(to..to, copy);
            }
            6 | 7 => {
                let number = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
                let width = [2, 4, 8][random.below(3)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&number[..width]);
            }
            _ => replace_word(random, &mut bytes, at),
        }
    }
    bytes
}

/// Puts another word or number in the place of the first one after `at`.
fn replace_word(random: &mut Random, bytes: &mut Vec<u8>, at: usize) {
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || b"\"_.+-<>|/".contains(byte);
    let Some(start) = bytes[at..].iter().position(is_word).map(|offset| at + offset) else { return };
    let end = bytes[start..].iter().take(200).position(|byte| !is_word(byte)).map_or(bytes.len(), |n| start + n);
    let word = match random.below(8) {
        // Another word of the same text.
        0..3 => {
            let from = random.below(bytes.len());
            let word: Vec<u8> = bytes[from..].iter().copied().skip_while(|b| !is_word(b)).take_while(is_word).collect();
            word[..word.len().min(60)].to_vec()
        }
        3 => "[".repeat(100_000).into_bytes(),
        4 => "{\"a\":".repeat(20_000).into_bytes(),
        _ => random.one_of(&WORDS).as_bytes().to_vec(),
    };
    bytes.splice(start..end.min(bytes.len()), word);
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

/// Mutates the file `name` of a folder, and lets `read` read it each time. What `read` does with
/// what it could read is up to it; an error of its own that begins with "wrong" is a finding.
fn attack(folder: &Path, name: &str, read: &dyn Fn(&mut Random) -> Result<()>) -> Vec<String> {
    let path = folder.join(name);
    let whole = fs::read(&path).unwrap();
    if let Err(error) = read(&mut Random(0)) {
        return vec![format!("{name}: {error:#}")];
    }
    let all: u64 = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    let most = MEMORY.0 + MEMORY.1 * all as usize;
    let mut found = Vec::new();
    let (mut accepted, mut refused) = (0, 0);
    for seed in 0..*MUTATIONS {
        let mut random = Random(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ whole.len() as u64);
        let mutant = mutate(&mut random, &whole);
        fs::write(&path, &mutant).unwrap();
        let (outcome, bytes) = peak(|| catch_unwind(AssertUnwindSafe(|| read(&mut random))));
        match outcome {
            Err(panic) => found.push(format!("{name}, mutation {seed}: panicked: {}", text_of(&*panic))),
            Ok(Err(error)) if error.to_string().starts_with("wrong") => {
                found.push(format!("{name}, mutation {seed}: {error:#}"));
            }
            Ok(Err(_)) => refused += 1,
            Ok(Ok(())) => accepted += 1,
        }
        if bytes > most {
            found.push(format!("{name}, mutation {seed}: took {} MiB", bytes >> 20));
        }
        if found.len() > 20 {
            break;
        }
    }
    fs::write(&path, &whole).unwrap();
    println!("{name}: {accepted} read, {refused} refused, {} found", found.len());
    found
}

/// Fails if anything was found.
#[track_caller]
fn conclude(found: Vec<String>) {
    assert!(found.is_empty(), "{} found:\n{}", found.len(), found.join("\n"));
}

/// Uses a model that could be opened: builds it now and then, and lets it speak.
fn use_model(random: &mut Random, opened: Pretrained) -> Result<()> {
    use_tokenizer(&opened.tokenizer)?;
    if random.below(16) == 0 {
        let model = opened.decoder(&Device::Cpu)?;
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        generate(&model, &opened.tokenizer, "he", 2, sampling, |_| Ok(true))?;
    }
    Ok(())
}

fn use_tokenizer(tokenizer: &Tokenizer) -> Result<()> {
    let tokens = tokenizer.encode("Once upon a time, é日\n\n  the end.")?;
    tokenizer.decode(&tokens)?;
    let mut stream = tokenizer.stream();
    for token in tokens {
        stream.push(token)?;
    }
    stream.finish()?;
    Ok(())
}

fn open(path: &Path) -> Result<Pretrained> {
    Pretrained::open(path.to_str().expect("paths of tests are text"))
}

#[test]
fn models_of_other_programs() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    gguf::write_examples(dir, ["merges.gguf", "scores.gguf"]).unwrap();
    llama2c::write_examples(dir, ["zero.bin", "one.bin"]).unwrap();
    let mut found = Vec::new();
    for name in ["merges.gguf", "scores.gguf", "zero.bin", "one.bin"] {
        found.extend(attack(dir, name, &|random| use_model(random, open(&dir.join(name))?)));
    }
    found.extend(attack(dir, "tokenizer.bin", &|random| use_model(random, open(&dir.join("zero.bin"))?)));
    conclude(found);
}

#[test]
fn hugging_face_folders() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    write_folder(dir, &llama_config(SMALL, "llama", true), &llama_weights(SMALL, false, true).unwrap()).unwrap();
    write_json(&dir.join("generation_config.json"), &serde_json::json!({"eos_token_id": [0, 3]}));
    write_json(&dir.join("tokenizer.json"), &word_tokenizer());
    let read = |random: &mut Random| use_model(random, open(dir)?);
    let mut found = Vec::new();
    for name in ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"] {
        found.extend(attack(dir, name, &read));
    }
    fs::rename(dir.join("model.safetensors"), dir.join("part.safetensors")).unwrap();
    let names = llama_weights(SMALL, false, true).unwrap().into_keys();
    let map: BTreeMap<String, &str> = names.map(|name| (name, "part.safetensors")).collect();
    write_json(&dir.join("model.safetensors.index.json"), &serde_json::json!({"weight_map": map}));
    found.extend(attack(dir, "model.safetensors.index.json", &read));
    conclude(found);
}

/// The folder of a finished training, and beside it what the program keeps of its data.
fn trained() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let train = ["train", "--data", SHORT, "--context", "16", "--batch-size", "4", "--vocab-size", "300"];
    let more = ["--max-steps", "1", "--attention", "favor:m=8,window=4,gate", "--out", "run"];
    let done = performer(dir.path(), &[&train[..], &more].concat());
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    dir
}

/// The weights of a model, to be compared.
fn weights(dir: &Path) -> Result<BTreeMap<String, Vec<u32>>> {
    let bits = |tensor: Tensor| -> Result<Vec<u32>> {
        Ok(tensor.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
    };
    let tensors = Checkpoint::load(dir, &Device::Cpu)?.tensors;
    tensors.into_iter().map(|(name, tensor)| Ok((name, bits(tensor)?))).collect()
}

/// Weights that this program wrote are read as they were written, or not at all; and no run goes on
/// from another state.
#[test]
fn checkpoints_of_this_program() {
    let dir = trained();
    let run = dir.path().join("run");
    let own = weights(&run).unwrap();
    let state = TrainingState::load(&run, &Device::Cpu).unwrap();
    let progress = {
        let mut progress = state.progress.clone();
        progress.as_object_mut().unwrap().remove("epoch_seconds");
        progress
    };
    let mut found = Vec::new();
    found.extend(attack(&run, "model.safetensors", &|random| {
        if weights(&run)? != own {
            bail!("wrong weights were read");
        }
        use_model(random, open(&run)?)
    }));
    for name in ["config.json", "tokenizer.json"] {
        found.extend(attack(&run, name, &|random| use_model(random, open(&run)?)));
    }
    for name in ["optimizer.safetensors", "train_state.json"] {
        found.extend(attack(&run, name, &|_| {
            let mut read = TrainingState::load(&run, &Device::Cpu)?;
            saved_data(&run)?;
            if let Some(fields) = read.progress.as_object_mut() {
                fields.remove("epoch_seconds");
            }
            let is_same = read.progress == progress
                && read.optimizer.len() == state.optimizer.len()
                && read.optimizer.iter().all(|(name, tensor)| {
                    let bytes =
                        |tensor: &Tensor| format!("{:?}", tensor.flatten_all().map(|t| t.to_vec1::<f32>().ok()).ok());
                    state.optimizer.get(name).is_some_and(|other| bytes(other) == bytes(tensor))
                });
            ensure!(is_same, "wrong state was read");
            Ok(())
        }));
    }
    found.extend(attack(&run, "metrics.jsonl", &|_| read_log(&run.join("metrics.jsonl")).map(drop)));
    conclude(found);
}

/// The file of the cache whose name begins and ends so.
fn cached(dir: &Path, (begin, end): (&str, &str)) -> String {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| name.starts_with(begin) && name.ends_with(end)).collect();
    names.sort();
    names.swap_remove(0)
}

#[test]
fn files_of_the_cache_and_texts() {
    let dir = trained();
    let dir = dir.path();
    let tokens = cached(dir, ("tokens-", ".bin"));
    let whole = TokenFile::open(&dir.join(&tokens)).unwrap();
    let (digest, count) = (whole.digest(), whole.len());
    let mut found = attack(dir, &tokens, &|_| {
        let file = TokenFile::open(&dir.join(&tokens))?;
        let is_same = file.digest() == digest && file.read(0..file.len()).len() == count;
        ensure!(is_same, "wrong tokens were read");
        Ok(())
    });
    let tokenizer = cached(dir, ("tokenizer-", ".json"));
    found.extend(attack(dir, &tokenizer, &|_| use_tokenizer(&Tokenizer::load(&dir.join(&tokenizer))?)));
    let story = "One day, é 日本 came.\n\nAnother line.\n<|endoftext|>\n";
    let text: PathBuf = dir.join("text.txt");
    fs::write(&text, (0..40).map(|i| format!("{i} {story}")).collect::<String>()).unwrap();
    let spec = DataSpec::Path(text);
    found.extend(attack(dir, "text.txt", &|_| {
        let corpus = Corpus::load(&spec, &Silent)?;
        let bytes: usize = corpus.train.iter().chain(corpus.valid.iter()).map(str::len).sum();
        ensure!(bytes > 0, "there is no text");
        Ok(())
    }));
    conclude(found);
}

/// A decoding state that was saved, of every kind of memory.
#[test]
fn decoding_states() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut found = Vec::new();
    for (i, spec) in ["favor:m=8", "favor:m=8,window=4,sinks=1", "softmax", "softmax:window=4"].into_iter().enumerate()
    {
        let config: AttentionConfig = spec.parse().unwrap();
        let attention = config.build(4, 3, candle_core::DType::F32, &Device::Cpu).unwrap();
        let x = Tensor::arange(0f32, 2.0 * 7.0 * 4.0, &Device::Cpu).unwrap().reshape((1, 2, 7, 4)).unwrap();
        let x = (x * 0.03).unwrap();
        let inputs = performer_core::Inputs::new(&x, &x, &x);
        let mut state = State::new();
        attention.extend(inputs, &mut state).unwrap();
        let name = format!("{i}.safetensors");
        state.save(dir.join(&name)).unwrap();
        found.extend(attack(dir, &name, &|_| {
            let mut state = State::load(dir.join(&name), &Device::Cpu)?;
            state.select(&[0])?;
            attention.extend(inputs, &mut state)?;
            Ok(())
        }));
    }
    conclude(found);
}

/// Texts by which attentions, schedules and data are named: what is understood is shown, and what
/// is shown is understood to be the same.
#[test]
fn names_of_settings() {
    let attentions = [
        "favor:m=64,map=relu,projection=gaussian,radii=sqrt,window=32,sinks=4,gate,conv",
        "softmax:window=32,sinks=4,output-gate,output-norm",
        "softmax+favor:map=limit-4/2",
        "uniform:gate",
        "favor-window:map=hedgehog",
        "favor:m=32|softmax:window=8|favor:gate,conv",
    ];
    let schedules = ["constant", "one-cycle:div=10", "warmup-cosine:warmup_steps=100"];
    let mut found = Vec::new();
    for seed in 0..*MUTATIONS * 10 {
        let mut random = Random(seed);
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let attention = random.one_of(&attentions);
        let attention = text(mutate(&mut random, attention.as_bytes()));
        let schedule = random.one_of(&schedules);
        let schedule = text(mutate(&mut random, schedule.as_bytes()));
        let read = || -> Result<()> {
            if let Ok(read) = attention.parse::<AttentionPattern>() {
                let again = read.to_string().parse::<AttentionPattern>().map(|again| again.to_string());
                ensure!(again == Ok(read.to_string()), "wrong: {attention:?} is shown as {read}");
                if let Ok(small) = (ModelConfig { layers: 4, ..example_config() }).with_attention(&read) {
                    small.validate()?;
                }
            }
            if let Ok(read) = schedule.parse::<Schedule>() {
                for step in [0, 1, 50, 99] {
                    let rate = read.lr(1e-3, step, 100);
                    ensure!(rate.is_finite() && rate >= 0.0, "wrong: {schedule:?} gives the rate {rate}");
                }
            }
            schedule.parse::<DataSpec>()?;
            Ok(())
        };
        let (outcome, bytes) = peak(|| catch_unwind(AssertUnwindSafe(read)));
        match outcome {
            Err(panic) => found.push(format!("{attention:?}, {schedule:?}: panicked: {}", text_of(&*panic))),
            Ok(Err(error)) if error.to_string().starts_with("wrong") => found.push(error.to_string()),
            Ok(_) if bytes > MEMORY.0 => found.push(format!("{attention:?}, {schedule:?}: {bytes} bytes")),
            Ok(_) => {}
        }
    }
    conclude(found);
}

fn example_config() -> ModelConfig {
    performer_lm::config::Preset::Seed.load().unwrap().0
}

/// Pickles run code when they are loaded; they are refused by that name.
#[test]
fn pickles_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in [
        ("model.bin", &b"PK\x03\x04 an archive of a pickle"[..]),
        ("model.pt", b"PK\x03\x04"),
        ("model.pth", b"\x80\x02}q\x00."),
        ("model.ckpt", b"\x80\x04\x95"),
    ] {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        let error = format!("{:#}", open(&path).unwrap_err());
        assert!(error.contains(name) && error.contains("pickle"), "{error}");
    }
    let folder = dir.path().join("folder");
    fs::create_dir(&folder).unwrap();
    write_json(&folder.join("config.json"), &llama_config(SMALL, "llama", true));
    write_json(&folder.join("tokenizer.json"), &word_tokenizer());
    fs::write(folder.join("pytorch_model.bin"), b"PK\x03\x04").unwrap();
    let error = format!("{:#}", open(&folder).unwrap_err());
    assert!(error.contains("pytorch_model.bin") && error.contains("pickle"), "{error}");
}
