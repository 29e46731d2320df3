//! This program's own configurations: of a model, beside its weights, and of a training.

#![no_main]

use std::{fs, sync::LazyLock};

use libfuzzer_sys::fuzz_target;
use performer_fuzz::{choice, fixture, use_model};
use performer_lm::{
    config::{ModelConfig, TrainingConfig},
    model::pretrained::Pretrained,
};

static RUN: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
    ["run/tokenizer.json", "run/model.safetensors"].map(|name| fs::read(fixture(name)).expect("a file"))
});

fuzz_target!(|input: &[u8]| {
    let Some((which, json)) = choice(input, 2) else { return };
    if which == 1 {
        if let Ok(config) = serde_json::from_slice::<TrainingConfig>(json)
            && config.validate().is_ok()
        {
            let again = serde_json::to_vec(&config).expect("it can be written");
            assert_eq!(serde_json::from_slice::<TrainingConfig>(&again).expect("it can be read again"), config);
        }
        return;
    }
    if let Ok(config) = serde_json::from_slice::<ModelConfig>(json)
        && config.validate().is_ok()
    {
        let again = serde_json::to_vec(&config).expect("it can be written");
        assert_eq!(serde_json::from_slice::<ModelConfig>(&again).expect("it can be read again"), config);
    }
    let [tokenizer, weights] = &*RUN;
    let _ = Pretrained::from_bytes(json, tokenizer.clone(), weights).and_then(|opened| use_model(&opened));
});
