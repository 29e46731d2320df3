//! This module writes vocabularies of other formats as a `tokenizer.json`.

use std::collections::{HashMap, HashSet};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

/// `Spaces` says how a SentencePiece vocabulary spells a space.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Spaces {
    /// A space is a space, and one is put before every text.
    Plain,
    /// A space is `▁`, and one is put before every text.
    Marked,
    /// A space is `▁`, and none is put before a text.
    MarkedOnly,
}

/// `Added` lists tokens, by id and spelling, that are found in a text before it is split: special
/// ones, which stand for no text of their own, and those that a user has defined.
#[derive(Default)]
struct Added(Vec<Value>);

impl Added {
    fn push(&mut self, id: usize, content: &str, special: bool) {
        self.0.push(json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special,
        }));
    }
}

/// A `Scored` vocabulary has a score for each token, as SentencePiece makes them. A text is split
/// into its characters, and characters that have no token into their UTF-8 bytes. Then, of all
/// neighbours that make a token together, those with the best score are merged, the first of
/// equals, until nothing can be merged.
///
/// In `tokenizer.json` merges are pairs in an order. Two ways to split a token have equal scores
/// here but different ranks there, so where both occur and overlap in a text, the tokens may
/// differ: that takes a token such as `aaa` and its parts `aa` and `a`.
pub(super) struct Scored {
    spaces: Spaces,
    ids: HashMap<String, usize>,
    /// The tokens that are text, single characters among them, with their scores.
    scores: Vec<(String, f32)>,
    unknown: Option<String>,
    added: Added,
    tokens: Vec<String>,
    begin: Option<u32>,
}

impl Scored {
    pub(super) fn new(spaces: Spaces) -> Self {
        Self {
            spaces,
            ids: HashMap::new(),
            scores: Vec::new(),
            unknown: None,
            added: Added::default(),
            tokens: Vec::new(),
            begin: None,
        }
    }

    /// Appends a token that is a text.
    pub(super) fn push(&mut self, text: String, score: f32) {
        // Of tokens with equal spelling, only the first can be found.
        if !self.ids.contains_key(&text) {
            self.scores.push((text.clone(), score));
        }
        self.name(text);
    }

    /// Appends a token that is a byte.
    pub(super) fn push_byte(&mut self, byte: u8) {
        self.name(format!("<0x{byte:02X}>"));
    }

    /// Appends the token that stands for characters that have none.
    pub(super) fn push_unknown(&mut self, text: &str) {
        self.unknown = Some(text.to_owned());
        self.push_control(text);
    }

    /// Appends a token that stands for no text.
    pub(super) fn push_control(&mut self, text: &str) {
        self.added.push(self.tokens.len(), text, true);
        self.name(text.to_owned());
    }

    /// Appends a token that is found before all others.
    pub(super) fn push_user_defined(&mut self, text: &str) {
        self.added.push(self.tokens.len(), text, false);
        self.name(text.to_owned());
    }

    /// Puts a token before every text.
    pub(super) fn begin_with(&mut self, id: u32) {
        self.begin = Some(id);
    }

    fn name(&mut self, text: String) {
        let id = self.tokens.len();
        self.ids.entry(text.clone()).or_insert(id);
        self.tokens.push(text);
    }

    pub(super) fn tokenizer_json(&self) -> Result<Vec<u8>> {
        let is_text: HashMap<&str, usize> = self.scores.iter().map(|(text, _)| (&**text, self.ids[text])).collect();
        // Both halves of a merge have the length of a token, which is known without a look at their
        // bytes: a token of a damaged file may have millions.
        let lengths: HashSet<usize> = is_text.keys().map(|text| text.len()).collect();
        let mut merges = Vec::new();
        for (text, score) in &self.scores {
            ensure!(!score.is_nan(), "token {text:?} has no score: the file is damaged");
            let halves = text.char_indices().skip(1).map(|(at, _)| at);
            for at in halves.filter(|at| lengths.contains(at) && lengths.contains(&(text.len() - at))) {
                let (left, right) = text.split_at(at);
                if let (Some(l), Some(r)) = (is_text.get(left), is_text.get(right)) {
                    merges.push((-score, is_text[&**text], l, r, [left, right]));
                }
            }
        }
        merges.sort_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2, a.3).cmp(&(b.1, b.2, b.3))));
        let merges: Vec<[&str; 2]> = merges.into_iter().map(|merge| merge.4).collect();

        let (space, prefixed) = match self.spaces {
            Spaces::Plain => (" ", true),
            Spaces::Marked => ("▁", true),
            Spaces::MarkedOnly => ("▁", false),
        };
        let (mut normalizers, mut decoders) = (Vec::new(), Vec::new());
        if prefixed {
            normalizers.push(json!({"type": "Prepend", "prepend": space}));
        }
        if space != " " {
            let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
            normalizers.push(replace(" ", space));
            decoders.push(replace(space, " "));
        }
        decoders.extend([json!({"type": "ByteFallback"}), json!({"type": "Fuse"})]);
        if prefixed {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let model = json!({
            "type": "BPE", "dropout": null, "unk_token": self.unknown, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": self.ids, "merges": merges,
        });
        file(
            &self.added,
            json!({"type": "Sequence", "normalizers": normalizers}),
            Value::Null,
            template(self.begin, &self.tokens)?,
            json!({"type": "Sequence", "decoders": decoders}),
            model,
        )
    }
}

/// The names that llama.cpp gives Llama 3's way to cut text into words. Such a vocabulary takes
/// whole words before it looks at merges.
pub(super) const LLAMA3: [&str; 3] = ["llama-bpe", "llama3", "llama-v3"];

/// A `ByteLevel` vocabulary has its merges in order, as GPT-2's has.
pub(super) struct ByteLevel<'a> {
    pub(super) tokens: Vec<String>,
    /// The merges, as pairs with a space between.
    pub(super) merges: Vec<String>,
    /// Ids of tokens that stand for no text.
    pub(super) control: Vec<usize>,
    /// Ids of tokens that are found before all others.
    pub(super) user_defined: Vec<usize>,
    /// How text is cut into words before bytes are merged, by the name that llama.cpp gives it.
    pub(super) words: &'a str,
    pub(super) begin: Option<u32>,
}

impl ByteLevel<'_> {
    pub(super) fn tokenizer_json(&self) -> Result<Vec<u8>> {
        let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
        let sequence =
            |first: Value, use_regex| json!({"type": "Sequence", "pretokenizers": [first, byte_level(use_regex)]});
        let split = |digits: &str| {
            let regex = format!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            );
            json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
        };
        let mut normalizer = Value::Null;
        let words = match self.words {
            "gpt-2" => byte_level(true),
            "smollm" => sequence(json!({"type": "Digits", "individual_digits": true}), true),
            name if LLAMA3.contains(&name) => sequence(split(r"\p{N}{1,3}"), false),
            "qwen2" => {
                normalizer = json!({"type": "NFC"});
                sequence(split(r"\p{N}"), false)
            }
            other => bail!(
                "the tokenizer cuts words as {other:?} does; supported are gpt-2, smollm, llama-bpe and qwen2 (take the model's Hugging Face \
                 folder instead)"
            ),
        };
        let mut merges = Vec::with_capacity(self.merges.len());
        for merge in &self.merges {
            let pair = merge.split_once(' ');
            let (left, right) = pair.with_context(|| format!("merge {merge:?} is no pair: the file is damaged"))?;
            merges.push([left, right]);
        }
        let ids: HashMap<&str, usize> =
            self.tokens.iter().enumerate().rev().map(|(id, token)| (&**token, id)).collect();
        let mut added = Added::default();
        for (list, special) in [(&self.control, true), (&self.user_defined, false)] {
            for &id in list {
                added.push(id, &self.tokens[id], special);
            }
        }
        let model = json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": LLAMA3.contains(&self.words), "vocab": ids, "merges": merges,
        });
        file(&added, normalizer, words, template(self.begin, &self.tokens)?, byte_level(true), model)
    }
}

/// Makes a post-processor that puts a token before every text.
fn template(begin: Option<u32>, tokens: &[String]) -> Result<Value> {
    let Some(id) = begin else { return Ok(Value::Null) };
    let token = tokens.get(id as usize).with_context(|| format!("token {id}, which begins a text, does not exist"))?;
    let special = |type_id: usize| json!({"SpecialToken": {"id": token, "type_id": type_id}});
    let text = |name: &str, type_id: usize| json!({"Sequence": {"id": name, "type_id": type_id}});
    Ok(json!({
        "type": "TemplateProcessing",
        "single": [special(0), text("A", 0)],
        "pair": [special(0), text("A", 0), special(1), text("B", 1)],
        "special_tokens": {token.as_str(): {"id": token, "ids": [id], "tokens": [token]}},
    }))
}

fn file(
    added: &Added,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: Value,
) -> Result<Vec<u8>> {
    Ok(serde_json::to_vec(&json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.0, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": post_processor, "decoder": decoder, "model": model,
    }))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// To look for both halves of each way to split a token takes the square of its length, which
    /// for the token of a damaged file is hours.
    #[test]
    fn a_token_as_long_as_a_book_is_read() -> Result<()> {
        let mut scored = Scored::new(Spaces::Plain);
        scored.push_unknown("<unk>");
        let book = "a".repeat(3_000_000);
        for (text, score) in [("a", -1.0), ("aa", -2.0), ("aaa", -3.0), (&*book, -4.0)] {
            scored.push(text.to_owned(), score);
        }
        let json: Value = serde_json::from_slice(&scored.tokenizer_json()?)?;
        assert_eq!(json["model"]["merges"], json!([["a", "a"], ["a", "aa"], ["aa", "a"]]));
        Ok(())
    }
}
