//! Texts by which attentions, learning-rate schedules and data are named.

#![no_main]

use std::sync::LazyLock;

use candle_core::{DType, Device};
use libfuzzer_sys::fuzz_target;
use performer_lm::{
    config::{AttentionConfig, AttentionPattern, ModelConfig, Preset, Schedule},
    data::DataSpec,
};

static MODEL: LazyLock<ModelConfig> =
    LazyLock::new(|| ModelConfig { layers: 4, ..Preset::Seed.load().expect("a preset").0 });

fuzz_target!(|input: &[u8]| {
    let text = String::from_utf8_lossy(input);
    if let Ok(pattern) = text.parse::<AttentionPattern>() {
        let shown = pattern.to_string();
        // Maps without random rows pass over how many there would be, so texts are compared.
        let again = shown.parse::<AttentionPattern>().map(|again| again.to_string());
        assert_eq!(again.as_ref(), Ok(&shown), "{text:?} is shown as {shown}");
        if let Ok(config) = MODEL.clone().with_attention(&pattern)
            && config.validate().is_ok()
        {
            let json = serde_json::to_string(&config).expect("it can be written");
            assert_eq!(serde_json::from_str::<ModelConfig>(&json).expect("it can be read again"), config);
        }
    }
    if let Ok(config) = text.parse::<AttentionConfig>() {
        let shown = config.to_string();
        let again = shown.parse::<AttentionConfig>().map(|again| again.to_string());
        assert_eq!(again.as_ref(), Ok(&shown), "{text:?} is shown as {shown}");
        // Whatever it is, it is built or refused; to draw many rows takes its time.
        let features = config.by_head().iter().filter_map(AttentionConfig::favor).map(|favor| favor.features);
        if features.fold(0, usize::saturating_add) <= 64 {
            let _ = config.build(4, 3, DType::F32, &Device::Cpu);
        }
    }
    if let Ok(schedule) = text.parse::<Schedule>() {
        for step in [0, 1, 50, 99] {
            let rate = schedule.lr(1e-3, step, 100);
            assert!(rate.is_finite() && rate >= 0.0, "{text:?} gives the rate {rate}");
        }
        let json = serde_json::to_string(&schedule).expect("it can be written");
        assert_eq!(serde_json::from_str::<Schedule>(&json).expect("it can be read again"), schedule);
    }
    if let Ok(data) = text.parse::<DataSpec>() {
        assert_eq!(data.to_string().parse::<DataSpec>().expect("it can be read again"), data);
    }
});
