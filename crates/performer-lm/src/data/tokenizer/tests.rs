use super::*;
use serde_json::json;

pub(crate) fn documents(text: &str) -> Documents {
    Documents::from_text(text.to_string())
}

/// Returns a small corpus with enough repetition for some merges.
pub(crate) fn stories() -> Documents {
    let story = |i| format!("Once upon a time, {i} little cats went to the park. They were happy.");
    let all: Vec<_> = (0..50).map(story).collect();
    documents(&all.join("\n<|endoftext|>\n"))
}

const UNICODE: &str = "Zoë said: «naïve» 日本語, 한국어 und ﷽! 👩‍👩‍👧‍👦 🇫🇷 e\u{301}\t\r\n  \u{0} <|endoftext|> \u{fffd}x";

#[test]
fn training_is_deterministic() {
    let one = Tokenizer::train(&stories(), 400).unwrap();
    let two = Tokenizer::train(&stories(), 400).unwrap();
    assert_eq!(one.as_bytes(), two.as_bytes());
    assert_eq!(one.eot(), 0);
    assert!(one.vocab_size() > 300 && one.vocab_size() <= 400);
    let small = Tokenizer::train(&stories(), 300).unwrap();
    assert_eq!(small.vocab_size(), 300);
    assert_ne!(small.hash(), one.hash());
    assert_eq!(Tokenizer::train(&stories(), MIN_VOCAB_SIZE).unwrap().vocab_size(), MIN_VOCAB_SIZE);
    assert!(Tokenizer::train(&stories(), MIN_VOCAB_SIZE - 1).is_err());
}

#[test]
fn a_tokenizer_is_trained_on_the_beginning_of_a_text() {
    let text = documents("four<|endoftext|>more<|endoftext|>rest");
    for (bytes, documents) in [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (99, 3)] {
        assert_eq!(beginning(&text, bytes).count(), documents, "{bytes} bytes");
    }
}

#[test]
fn any_text_survives() {
    let tokenizer = Tokenizer::train(&stories(), 400).unwrap();
    for text in [UNICODE, "", " ", "\n\n", " lead and trail \n"] {
        let tokens = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&tokens).unwrap(), text);
        assert!(!tokens.contains(&tokenizer.eot()));
    }
    let sentence = "Once upon a time";
    assert!(tokenizer.encode(sentence).unwrap().len() < sentence.len() / 2);
}

/// The time to learn from a word grows with the square of its length, so that a text without
/// spaces took hours.
#[test]
fn long_words_are_learned_from_in_parts() {
    let long = "añb".repeat(2000);
    let text = format!("Two words. {long} and\n{long}");
    let parts: Vec<&str> = parts_of_words(&text).collect();
    assert_eq!(parts.concat(), text);
    let longest = parts.iter().flat_map(|part| part.split_whitespace()).map(str::len).max();
    assert!(longest <= Some(MAX_WORD + 2) && parts.len() == 2 * (long.len() / (MAX_WORD + 2)) + 1, "{longest:?}");
    for text in ["", " ", "a text of short words\n\n", &"word ".repeat(9999)] {
        assert_eq!(parts_of_words(text).collect::<String>(), text);
        assert!(parts_of_words(text).count() <= 1);
    }
}

#[test]
fn no_room_is_made_for_more_tokens_than_the_text_can_have() {
    let most = Tokenizer::train(&stories(), MAX_VOCAB_SIZE).unwrap();
    assert!(most.vocab_size() < 1000);
    let error = Tokenizer::train(&stories(), MAX_VOCAB_SIZE + 1).unwrap_err().to_string();
    assert!(error.contains("at most 16777216"), "{error}");
}

#[test]
fn decoders_that_fail_are_refused_and_nothing_is_decoded_to_nothing() {
    let tokenizer = Tokenizer::train(&stories(), 300).unwrap();
    let with = |decoder: Value| {
        let mut json: Value = serde_json::from_slice(tokenizer.as_bytes()).unwrap();
        json["decoder"] = decoder;
        Tokenizer::from_bytes(json.to_string().into_bytes())
    };
    let strip = |stop: u32| serde_json::json!({"type": "Strip", "content": "a", "start": 1, "stop": stop});
    let sequence = serde_json::json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, strip(2)]});
    // The library knows a decoder by its fields, too.
    let unnamed = serde_json::json!({"content": "a", "start": 1, "stop": 1});
    for broken in [strip(1), sequence, unnamed] {
        let error = with(broken).unwrap_err().to_string();
        assert!(error.contains("Strip") && error.contains("stop"), "{error}");
    }
    assert!(with(strip(0)).unwrap().decode(&[65]).is_ok());
    // Half of a surrogate pair is no text; the library panics where a decoder has one.
    let text = String::from_utf8(tokenizer.as_bytes().to_vec()).unwrap();
    let half = text.replacen("\"decoder\":{", r#""decoder":{"half":"\ud800","#, 1);
    assert_ne!(half, text);
    let error = Tokenizer::from_bytes(half.into_bytes()).unwrap_err().to_string();
    assert!(error.contains("not a tokenizer.json"), "{error}");
    let bpe = with(serde_json::json!({"type": "BPEDecoder", "suffix": "</w>"})).unwrap();
    for nothing in [&[][..], &[0], &[0, 0], &[99_999]] {
        assert_eq!(bpe.decode(nothing).unwrap(), "");
    }
    assert_eq!(bpe.stream().finish().unwrap(), "");
}

#[test]
fn saved_and_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let tokenizer = Tokenizer::train(&stories(), 400).unwrap();
    tokenizer.save(&path).unwrap();
    let loaded = Tokenizer::load(&path).unwrap();
    assert_eq!(loaded.hash(), tokenizer.hash());
    assert_eq!(loaded.encode(UNICODE).unwrap(), tokenizer.encode(UNICODE).unwrap());

    fs::write(&path, "{}").unwrap();
    let error = format!("{:#}", Tokenizer::load(&path).unwrap_err());
    assert!(error.contains("tokenizer.json"), "{error}");
    assert!(Tokenizer::load(&dir.path().join("none")).is_err());
}

/// Returns a word-level tokenizer as other programs write them: with sparse ids, a truncation,
/// and a name of its own for the end of text.
fn foreign(end: &str) -> Vec<u8> {
    let json = serde_json::json!({
        "version": "1.0", "normalizer": null, "post_processor": null, "decoder": null, "padding": null,
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [{"id": 9, "content": end, "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2, end: 9}, "unk_token": "?"}
    });
    json.to_string().into_bytes()
}

#[test]
fn loads_what_others_wrote() {
    let tokenizer = Tokenizer::from_bytes(foreign("</s>")).unwrap();
    assert_eq!((tokenizer.eot(), tokenizer.vocab_size()), (9, 10));
    assert_eq!(tokenizer.encode("a b a b").unwrap(), [0, 1, 0, 1]);
    let error = Tokenizer::from_bytes(foreign("<stop>")).unwrap_err();
    assert!(error.to_string().contains("end-of-text"), "{error}");
}

/// A fuzzer found the first template: with it, the library panics when it encodes a text. Its code
/// shows that it also panics at a template that names a second text, and at a template that follows
/// another one, which may leave it other than one or two parts.
#[test]
fn templates_that_fail_are_refused() {
    let piece = |kind: &str, id: &str| serde_json::json!({kind: {"id": id, "type_id": 0}});
    let (text, other) = (piece("Sequence", "A"), piece("Sequence", "B"));
    let (end, unknown) = (piece("SpecialToken", "</s>"), piece("SpecialToken", "<s>"));
    let template = |single: [&Value; 2]| {
        serde_json::json!({
            "type": "TemplateProcessing", "single": single, "pair": [text, other],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [9], "tokens": ["</s>"]}},
        })
    };
    let sequence = |processors: [&Value; 2]| serde_json::json!({"type": "Sequence", "processors": processors});
    let with = |post_processor: &Value| {
        let mut json: Value = serde_json::from_slice(&foreign("</s>")).unwrap();
        json["post_processor"] = post_processor.clone();
        json.to_string().into_bytes()
    };
    let sound = template([&text, &end]);
    let space = serde_json::json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false});
    for (broken, reason) in [
        (template([&unknown, &text]), "\"<s>\""),
        (sequence([&space, &template([&unknown, &text])]), "\"<s>\""),
        (template([&text, &other]), "Sequence B"),
        (sequence([&sound, &sound]), "one after the other"),
        (sequence([&sound, &sequence([&space, &sound])]), "one after the other"),
    ] {
        for read in [Tokenizer::from_bytes(with(&broken)), Tokenizer::of_model(with(&broken), &[9])] {
            let error = format!("{:#}", read.unwrap_err());
            assert!(error.contains("post-processor") && error.contains(reason), "{error}");
        }
    }
    for whole in [sound.clone(), sequence([&space, &sound])] {
        let tokenizer = Tokenizer::of_model(with(&whole), &[9]).unwrap();
        assert_eq!(tokenizer.borders().end, Some(9));
        assert_eq!(tokenizer.encode("a b").unwrap(), [0, 1]);
    }
}

#[test]
fn streaming_is_decoding() {
    let tokenizer = Tokenizer::train(&stories(), 300).unwrap();
    // `broken` leaves out every second token, which breaks characters apart.
    let tokens = tokenizer.encode(UNICODE).unwrap();
    let broken: Vec<_> = tokens.iter().copied().step_by(2).collect();
    let ended: Vec<_> = [0].iter().chain(&tokens).chain(&[0, 0]).copied().collect();
    for tokens in [&tokens[..], &broken, &ended, &tokens[..tokens.len() - 1], &[]] {
        let mut stream = tokenizer.stream();
        let mut text = String::new();
        for &token in tokens {
            text.extend(stream.push(token).unwrap());
        }
        text += &stream.finish().unwrap();
        assert_eq!(text, tokenizer.decode(tokens).unwrap());
    }
}

#[test]
fn streaming_never_shows_half_a_character() {
    let tokenizer = Tokenizer::train(&stories(), 300).unwrap();
    let mut stream = tokenizer.stream();
    let mut shown = Vec::new();
    for token in tokenizer.encode("a日👍b").unwrap() {
        shown.extend(stream.push(token).unwrap());
    }
    assert_eq!(shown, ["a", "日", "👍", "b"]);
}

/// Llama's tokenizers write bytes as tokens. Where the bytes of a character do not become complete,
/// such a decoder shows all bytes beside them as `�`, the line break before them among them.
#[test]
fn streaming_goes_on_after_bytes_that_are_no_text() {
    let part = |kind: &str| json!({"type": kind});
    let vocabulary = json!({"</s>": 0, "<0x0A>": 1, "<0xE2>": 2, "▁a": 3, "▁time": 4});
    let decoders = [
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        part("ByteFallback"),
        part("Fuse"),
        json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}),
    ];
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "added_tokens": [], "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "byte_fallback": true, "vocab": vocabulary, "merges": []},
    });
    let tokenizer = Tokenizer::of_model(file.to_string().into_bytes(), &[0]).unwrap();
    let mut stream = tokenizer.stream();
    let shown: Vec<_> = [3, 1, 2, 3, 4].into_iter().map(|token| stream.push(token).unwrap()).collect();
    let shown: Vec<_> = shown.iter().map(Option::as_deref).collect();
    assert_eq!(shown, [Some("a"), Some("\n"), None, Some("� a"), Some(" time")]);
    assert_eq!(stream.finish().unwrap(), "");
}

/// What is set before a text is told by the parts of a tokenizer, not by words in its file.
#[test]
fn what_changes_the_beginning_is_told_by_the_parts() {
    let with = |part: &str, value: serde_json::Value| {
        let mut json: serde_json::Value = serde_json::from_slice(&foreign("<|endoftext|>")).unwrap();
        match part {
            "vocab" => json["model"]["vocab"] = value,
            _ => json[part] = value,
        }
        Tokenizer::from_bytes(json.to_string().into_bytes()).unwrap().changes_the_beginning()
    };
    let prepend = serde_json::json!({"type": "Prepend", "prepend": "_"});
    assert!(with("normalizer", prepend.clone()));
    assert!(with("normalizer", serde_json::json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, prepend]})));
    assert!(!with("normalizer", serde_json::json!({"type": "NFC"})));
    let metaspace =
        serde_json::json!({"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": true});
    assert!(with("pre_tokenizer", metaspace));
    let mut json: serde_json::Value = serde_json::from_slice(&foreign("<|endoftext|>")).unwrap();
    let mut vocab = json["model"]["vocab"].take();
    let count = vocab.as_object().unwrap().len();
    vocab["Prepend"] = count.into();
    vocab["Metaspace"] = (count + 1).into();
    assert!(!with("vocab", vocab));
}
