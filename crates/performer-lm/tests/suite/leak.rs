//! A model that sees the tokens that it predicts shows what such a loss is worth, and can do
//! nothing else.

use super::program::{fails, json, performer};

#[test]
fn a_leak_is_measured_and_good_for_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    // Words in no order, so that nothing before a word tells which it is.
    let mut word = 1u32;
    let text: String = (0..4000)
        .map(|_| {
            word = word.wrapping_mul(1_103_515_245).wrapping_add(12345);
            ["red ", "blue ", "green ", "grey ", "white ", "black ", "pink ", "brown "][(word >> 20) as usize % 8]
        })
        .collect();
    std::fs::write(dir.path().join("words.txt"), text).unwrap();
    for (attention, out) in [("softmax", "exact-leak"), ("favor:m=32", "linear-leak")] {
        let args = ["train", "--data", "words.txt", "--vocab-size", "300", "--context", "32", "--batch-size", "8"];
        let rest = ["--max-steps", "100", "--epochs", "100", "--learning-rate", "1e-2", "--json", "--leak"];
        let named = ["--attention", attention, "--out", out];
        let report = json(&performer(dir.path(), &[&args[..], &rest, &named].concat()));
        // Whoever does not see the next word cannot do better than ln 8 = 2.08, one of eight.
        assert!(report["val_loss"].as_f64().unwrap() < 1.5, "{attention}: {}", report["val_loss"]);
        assert_eq!((&report["state_bytes"], &report["state_grows"]), (&0.into(), &false.into()));
    }
    let generate = performer(dir.path(), &["generate", "exact-leak"]);
    let message = String::from_utf8_lossy(&generate.stderr);
    assert!(!generate.status.success() && message.contains("\"leak\": true"), "{message}");
    let recall = performer(dir.path(), &["eval", "linear-leak", "--data", "words.txt", "--recall", "256"]);
    let message = String::from_utf8_lossy(&recall.stderr);
    assert!(!recall.status.success() && message.contains("--recall: linear-leak was trained to see"), "{message}");
    // The loss of a leak is measured again as it was, and told to be one.
    let eval = performer(dir.path(), &["eval", "linear-leak", "--data", "words.txt", "--json"]);
    let again = json(&eval);
    assert!(again["val_loss"].as_f64().unwrap() < 1.5, "{again}");
    assert_eq!(again["leak"], true);
    let said = String::from_utf8_lossy(&eval.stderr);
    assert!(said.contains("say nothing about how well it predicts"), "{said}");
    let off = ["eval", "linear-leak", "--data", "words.txt", "--features-off"];
    fails(&performer(dir.path(), &off), &["trained to see the tokens that it predicts"]);
    let window = ["eval", "exact-leak", "--data", "words.txt", "--window", "8"];
    fails(&performer(dir.path(), &window), &["--window: exact-leak was trained to see", "which a window hides"]);
    // Gates and windows cannot do without the mask: that is said before a model is replaced.
    let before = std::fs::read(dir.path().join("linear-leak/model.safetensors")).unwrap();
    for attention in ["favor:m=8,gate", "softmax:window=4", "softmax+favor:m=8,window=4/2", "softmax|softmax:window=4"]
    {
        let args = ["train", "--data", "words.txt", "--leak", "--attention", attention];
        let over = ["--overwrite", "--out", "linear-leak", "--max-steps", "1"];
        fails(&performer(dir.path(), &[&args[..], &over].concat()), &["leak", "causal mask", "favor:m=128"]);
        let after = std::fs::read(dir.path().join("linear-leak/model.safetensors")).unwrap();
        assert!(before == after, "{attention}: the model was replaced");
    }
}
