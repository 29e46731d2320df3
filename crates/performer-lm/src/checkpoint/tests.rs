use anyhow::bail;

use super::*;
use serde_json::json;

/// Returns a checkpoint in which every file says to which checkpoint it belongs.
fn sample(id: u32) -> (Checkpoint, TrainingState) {
    let tensor = |x: u32| Tensor::full(x as f32, (3, 5), &Device::Cpu).unwrap();
    let checkpoint = Checkpoint {
        config: json!({"id": id, "dim": 64}),
        tokenizer: format!("{{\"id\": {id}}}").into_bytes(),
        tensors: HashMap::from([("w".to_owned(), tensor(id))]),
        metadata: BTreeMap::from([("id".to_owned(), id.to_string())]),
    };
    let training =
        TrainingState { optimizer: HashMap::from([("m.w".to_owned(), tensor(id))]), progress: json!({"id": id}) };
    (checkpoint, training)
}

fn first_value(tensors: &HashMap<String, Tensor>) -> u32 {
    let tensor = tensors.values().next().unwrap();
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()[0] as u32
}

/// Returns the ids in the parts of the checkpoint in `dir`, with those of the training state if
/// there should be one.
fn ids(dir: &Path, trained: impl Fn(u32) -> bool) -> Result<Vec<u32>> {
    let checkpoint = Checkpoint::load(dir, &Device::Cpu)?;
    let id = |json: &Value| json["id"].as_u64().unwrap() as u32;
    let model = first_value(&checkpoint.tensors);
    let tokenizer: Value = serde_json::from_slice(&checkpoint.tokenizer)?;
    let metadata = checkpoint.metadata["id"].parse()?;
    let mut ids = vec![model, id(&checkpoint.config), id(&tokenizer), metadata];
    let training = TrainingState::load(dir, &Device::Cpu);
    if trained(model) {
        let training = training?;
        ids.extend([first_value(&training.optimizer), id(&training.progress)]);
    } else {
        let error = training.unwrap_err().to_string();
        assert!(error.contains("holds no training state"), "{error}");
    }
    Ok(ids)
}

/// Returns the id of the one checkpoint to which all parts in `dir` belong.
#[track_caller]
fn whole(dir: &Path, trained: impl Fn(u32) -> bool) -> u32 {
    let ids = ids(dir, trained).unwrap();
    assert!(ids.iter().all(|id| *id == ids[0]), "a mix: {ids:?}");
    ids[0]
}

fn leftovers(dir: &Path) -> usize {
    let names = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name());
    names.filter(|n| n.to_string_lossy().ends_with(".new")).count()
}

/// Saves and is killed before the stage of that number, in the middle of the file if it writes one.
/// Returns false if the save had fewer stages.
fn killed_save(dir: &Path, id: u32, trained: bool, kill_at: usize) -> bool {
    let (checkpoint, training) = sample(id);
    let mut count = 0;
    let result = checkpoint.save_in_stages(dir, trained.then_some(&training), &mut |stage| {
        count += 1;
        if count <= kill_at {
            return Ok(());
        }
        if let Some(name) = stage.strip_prefix("write ") {
            fs::write(pending(dir, name), [b'{', 0, 0, 0, 0, 0, 0, 0, b'{'])?;
        }
        bail!("killed")
    });
    result.is_err()
}

/// What belongs to an old model is cleared when the new one is on the disk and the old one still in
/// place; if it cannot be, the old one stays.
#[test]
fn what_belongs_to_an_old_model_is_cleared_last() -> Result<()> {
    let root = tempfile::tempdir()?;
    let dir = root.path();
    let ((old, _), (new, _)) = (sample(1), sample(2));
    let mut calls = 0;
    old.save_over(dir, None, &mut || {
        calls += 1;
        Ok(())
    })?;
    assert_eq!(calls, 1);
    let error = new.save_over(dir, None, &mut || bail!("no permission")).unwrap_err();
    assert!(format!("{error:#}").contains("no permission"), "{error:#}");
    assert_eq!((whole(dir, |_| false), leftovers(dir)), (1, 0));
    new.save_over(dir, None, &mut || {
        assert_eq!(whole(dir, |_| false), 1);
        assert!(pending(dir, MODEL).exists());
        Ok(())
    })?;
    assert_eq!((whole(dir, |_| false), leftovers(dir)), (2, 0));
    Ok(())
}

#[test]
fn the_bytes_of_a_folder_are_what_it_holds() -> Result<()> {
    let root = tempfile::tempdir()?;
    let (checkpoint, _) = sample(7);
    checkpoint.save(root.path(), None)?;
    let files = [CONFIG, TOKENIZER, MODEL].map(|name| fs::read(root.path().join(name)).unwrap());
    let from = |[config, tokenizer, weights]: &[Vec<u8>; 3]| {
        Checkpoint::from_bytes(config, tokenizer.clone(), weights, &Device::Cpu)
    };
    let read = from(&files)?;
    assert_eq!((&read.config, &read.tokenizer), (&checkpoint.config, &checkpoint.tokenizer));
    assert_eq!((first_value(&read.tensors), &read.metadata), (7, &checkpoint.metadata));
    for (at, name) in [CONFIG, TOKENIZER, MODEL].into_iter().enumerate() {
        let mut damaged = files.clone();
        damaged[at].insert(0, b'x');
        let error = format!("{:#}", from(&damaged).unwrap_err());
        assert!(error.contains(name), "{error}");
    }
    Ok(())
}

#[test]
fn a_checkpoint_comes_back_as_it_was_saved() -> Result<()> {
    let root = tempfile::tempdir()?;
    let dir = root.path().join("a/b");
    let (checkpoint, training) = sample(7);
    checkpoint.save(&dir, Some(&training))?;
    assert_eq!(whole(&dir, |_| true), 7);
    let loaded = Checkpoint::load(&dir, &Device::Cpu)?;
    assert_eq!(loaded.config, checkpoint.config);
    assert_eq!(loaded.tokenizer, checkpoint.tokenizer);
    assert_eq!(loaded.metadata, checkpoint.metadata);
    assert_eq!(loaded.tensors["w"].dims(), [3, 5]);
    let files = || -> Result<Vec<Vec<u8>>> {
        let names = [CONFIG, TOKENIZER, MODEL, OPTIMIZER, TRAIN_STATE];
        names.iter().map(|name| Ok(fs::read(dir.join(name))?)).collect()
    };
    let first = files()?;
    loaded.save(&dir, Some(&TrainingState::load(&dir, &Device::Cpu)?))?;
    assert_eq!(files()?, first, "saving what was loaded changes no byte");
    Ok(())
}

#[test]
fn other_files_in_the_folder_stay_and_foreign_folders_load() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let dir = dir.path();
    let (checkpoint, training) = sample(1);
    fs::write(dir.join("README.md"), "card")?;
    fs::write(dir.join(CONFIG), r#"{"id": 3}"#)?;
    fs::write(dir.join(TOKENIZER), "{}")?;
    candle_core::safetensors::save(&checkpoint.tensors, dir.join(MODEL))?;
    assert_eq!(Checkpoint::load(dir, &Device::Cpu)?.config["id"], 3);
    assert!(TrainingState::load(dir, &Device::Cpu).is_err());

    checkpoint.save(dir, Some(&training))?;
    assert_eq!(fs::read_to_string(dir.join("README.md"))?, "card");
    fs::write(dir.join(CONFIG), r#"{"id": 4}"#)?;
    assert_eq!(Checkpoint::load(dir, &Device::Cpu)?.config["id"], 4, "edited by hand");
    Ok(())
}

#[test]
fn a_kill_at_any_stage_leaves_the_old_or_the_new_checkpoint() -> Result<()> {
    for (old_trained, new_trained) in [(true, true), (true, false), (false, true)] {
        let trained = |id| if id == 1 { old_trained } else { new_trained };
        let mut outcomes = Vec::new();
        for kill_at in 0.. {
            let dir = tempfile::tempdir()?;
            let dir = dir.path();
            let (old, old_training) = sample(1);
            old.save(dir, old_trained.then_some(&old_training))?;
            let killed = killed_save(dir, 2, new_trained, kill_at);
            outcomes.push(whole(dir, trained));
            let (next, next_training) = sample(3);
            next.save(dir, Some(&next_training))?;
            assert_eq!(whole(dir, |_| true), 3);
            assert_eq!(leftovers(dir), 0);
            if !killed {
                break;
            }
        }
        assert!(outcomes.is_sorted(), "{outcomes:?}");
        assert!(outcomes.len() > 8 && outcomes[0] == 1, "{outcomes:?}");
        let new = outcomes.iter().filter(|id| **id == 2).count();
        assert!(new > 3, "kills after the commit count too: {outcomes:?}");
    }
    Ok(())
}

#[test]
fn a_training_state_is_found_exactly_where_it_can_be_loaded() -> Result<()> {
    for (old_trained, new_trained) in [(true, false), (false, true), (true, true)] {
        for kill_at in 0.. {
            let dir = tempfile::tempdir()?;
            let dir = dir.path();
            let check = || -> Result<()> {
                assert_eq!(TrainingState::is_in(dir)?, TrainingState::load(dir, &Device::Cpu).is_ok());
                Ok(())
            };
            check()?;
            let (old, training) = sample(1);
            old.save(dir, old_trained.then_some(&training))?;
            assert_eq!(TrainingState::is_in(dir)?, old_trained);
            let killed = killed_save(dir, 2, new_trained, kill_at);
            check()?;
            if !killed {
                assert_eq!(TrainingState::is_in(dir)?, new_trained);
                break;
            }
        }
    }
    Ok(())
}

#[test]
fn a_second_kill_while_recovering_from_the_first_changes_nothing() -> Result<()> {
    'first: for first in 0.. {
        // One stage makes the folder, up to five clear up; no save commits before its seventh.
        for second in 0..7 {
            let dir = tempfile::tempdir()?;
            let dir = dir.path();
            let (old, training) = sample(1);
            old.save(dir, Some(&training))?;
            let first_killed = killed_save(dir, 2, true, first);
            let after_first = whole(dir, |_| true);
            assert!(killed_save(dir, 3, true, second));
            let after_second = whole(dir, |_| true);
            assert_eq!(after_second, after_first);
            if !first_killed {
                break 'first;
            }
        }
    }
    Ok(())
}

#[test]
fn a_first_save_that_was_killed_is_no_checkpoint_but_no_obstacle() -> Result<()> {
    for kill_at in 0.. {
        let root = tempfile::tempdir()?;
        let dir = root.path().join("run");
        let killed = killed_save(&dir, 1, true, kill_at);
        match ids(&dir, |_| true) {
            Ok(ids) => assert_eq!(ids, [1; 6]),
            Err(e) => {
                let e = e.to_string();
                assert!(e.contains("there is no folder") || e.contains("is missing"), "{e}");
            }
        }
        let (next, training) = sample(2);
        next.save(&dir, Some(&training))?;
        assert_eq!(whole(&dir, |_| true), 2);
        if !killed {
            break;
        }
    }
    Ok(())
}

#[test]
fn broken_folders_are_reported_by_file_and_reason() -> Result<()> {
    let root = tempfile::tempdir()?;
    let dir = root.path().join("run");
    let error = |load: &dyn Fn(&Path) -> Result<()>| format!("{:#}", load(&dir).unwrap_err());
    let model = |dir: &Path| Checkpoint::load(dir, &Device::Cpu).map(drop);
    let training = |dir: &Path| TrainingState::load(dir, &Device::Cpu).map(drop);

    assert!(error(&model).contains("there is no folder"));
    fs::write(&dir, "")?;
    assert!(error(&model).contains("is a file"));
    fs::remove_file(&dir)?;
    fs::create_dir(&dir)?;
    assert!(error(&model).contains("model.safetensors is missing"));

    let (checkpoint, state) = sample(1);
    let breaks: [(&str, &[u8], &str); 3] = [
        (CONFIG, b"{\"dim\":", "config.json is not JSON"),
        (TOKENIZER, b"<html>", "tokenizer.json is not JSON"),
        (MODEL, b"version https://git-lfs", "model.safetensors is damaged"),
    ];
    for (name, content, expected) in breaks {
        checkpoint.save(&dir, Some(&state))?;
        fs::write(dir.join(name), content)?;
        assert!(error(&model).contains(expected), "{}", error(&model));
        fs::remove_file(dir.join(name))?;
        let missing = format!("{name} is missing");
        assert!(error(&model).contains(&missing), "{}", error(&model));
    }
    for name in [MODEL, OPTIMIZER] {
        checkpoint.save(&dir, Some(&state))?;
        let bytes = fs::read(dir.join(name))?;
        for length in [0, 5, 40, bytes.len() - 1] {
            fs::write(dir.join(name), &bytes[..length])?;
            let error = error(if name == MODEL { &model } else { &training });
            let why = if name == MODEL { "is damaged" } else { "was not saved together" };
            assert!(error.contains(&format!("{name} {why}")), "{length}: {error}");
        }
    }
    // Another state than the one that was saved with the model is no state of this model.
    for name in [TRAIN_STATE, OPTIMIZER] {
        checkpoint.save(&dir, Some(&state))?;
        let other = tempfile::tempdir()?;
        let (another, its_state) = sample(2);
        another.save(other.path(), Some(&its_state))?;
        fs::copy(other.path().join(name), dir.join(name))?;
        let error = error(&training);
        assert!(error.contains(&format!("{name} was not saved together with model.safetensors")), "{error}");
        assert!(Checkpoint::load(&dir, &Device::Cpu).is_ok());
    }
    let state = TrainingState { progress: json!([]), ..state };
    checkpoint.save(&dir, Some(&state))?;
    let progress = TrainingState::load(&dir, &Device::Cpu)?;
    let error = progress.progress_as::<HashMap<String, u32>>().unwrap_err();
    assert!(error.to_string().contains("train_state.json was not written"), "{error}");
    let error = checkpoint.config_as::<Vec<u32>>().unwrap_err();
    assert!(error.to_string().contains("config.json does not describe"), "{error}");
    assert_eq!(checkpoint.config_as::<HashMap<String, u32>>()?["dim"], 64);
    Ok(())
}

#[test]
fn a_save_that_fails_says_why_and_leaves_the_old_checkpoint() -> Result<()> {
    let root = tempfile::tempdir()?;
    let file = root.path().join("file");
    fs::write(&file, "mine")?;
    let (checkpoint, training) = sample(1);
    let error = format!("{:#}", checkpoint.save(&file, None).unwrap_err());
    assert!(error.contains("cannot save a checkpoint in") && error.contains("cannot create"), "{error}");
    assert_eq!(fs::read_to_string(&file)?, "mine");

    let dir = root.path().join("run");
    checkpoint.save(&dir, Some(&training))?;
    // A folder is in the way of a file that is to be written, which fails for every user, even
    // root.
    fs::create_dir(pending(&dir, TOKENIZER))?;
    let (next, _) = sample(2);
    let error = format!("{:#}", next.save(&dir, None).unwrap_err());
    assert!(error.contains("tokenizer.json.new"), "{error}");
    assert_eq!(whole(&dir, |_| true), 1);
    Ok(())
}

/// How long a training took changes no byte of the model that it ends with.
#[test]
fn models_do_not_depend_on_the_time_that_their_training_took() -> Result<()> {
    let root = tempfile::tempdir()?;
    let model = |name: &str, seconds: f64, loss: f64| -> Result<Vec<u8>> {
        let (checkpoint, mut training) = sample(1);
        training.progress = json!({"seconds": seconds, "epochs": [{"epoch_seconds": seconds, "loss": loss}]});
        checkpoint.save(&root.path().join(name), Some(&training))?;
        TrainingState::load(&root.path().join(name), &Device::Cpu)?;
        Ok(fs::read(root.path().join(name).join(MODEL))?)
    };
    let first = model("first", 1.0, 2.0)?;
    assert_eq!(model("slower", 9.0, 2.0)?, first);
    assert_ne!(model("other", 1.0, 3.0)?, first);
    Ok(())
}

#[test]
fn stale_reports_go_and_what_cannot_be_removed_is_an_error() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let dir = dir.path();
    for name in ["metrics.json", "loss.svg", "convert.json"] {
        fs::write(dir.join(name), "old")?;
    }
    remove_reports(dir, |name| name != "convert.json")?;
    assert!(!dir.join("metrics.json").exists() && !dir.join("loss.svg").exists());
    assert!(dir.join("convert.json").exists());
    // A folder is no file, for root either.
    fs::create_dir(dir.join("loss.png"))?;
    let error = remove_reports(dir, |_| true).unwrap_err().to_string();
    assert!(error.contains("cannot remove") && error.contains("loss.png"), "{error}");
    Ok(())
}

/// A link that leads to itself is not a file that is missing.
#[cfg(unix)]
#[test]
fn only_a_file_that_is_not_there_has_no_digest() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("model");
    assert_eq!(file_digest(&path)?, None);
    std::os::unix::fs::symlink("model", &path)?;
    let error = file_digest(&path).unwrap_err().to_string();
    assert!(error.contains("cannot read"), "{error}");
    fs::remove_file(&path)?;
    fs::write(&path, "abc")?;
    assert_eq!(file_digest(&path)?, Some(blake3::hash(b"abc").to_hex().to_string()));
    Ok(())
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_the_old_checkpoint_and_no_litter() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let dir = dir.path();
    let (old, training) = sample(1);
    old.save(dir, Some(&training))?;
    let (next, training) = sample(2);
    for name in [CONFIG, OPTIMIZER, MODEL] {
        let result = next.save_in_stages(dir, Some(&training), &mut |stage| {
            if stage == format!("write {name}") {
                std::os::unix::fs::symlink("/dev/full", pending(dir, name))?;
            }
            Ok(())
        });
        let error = format!("{:#}", result.unwrap_err());
        assert!(error.contains(name) && error.contains("No space left"), "{error}");
        // Reading the device would not end; a full disk leaves the beginning of a file.
        fs::remove_file(pending(dir, name))?;
        fs::write(pending(dir, name), "{")?;
        assert_eq!(whole(dir, |_| true), 1);
        settle(dir, &mut |_| Ok(()))?;
        assert_eq!(leftovers(dir), 0);
    }
    Ok(())
}

/// What waits beside a model that cannot be read may be all that is left of it.
#[test]
fn files_that_wait_beside_an_unreadable_model_stay() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join(MODEL)).unwrap();
    let waiting = pending(dir.path(), COMPANIONS[0]);
    fs::write(&waiting, "{}").unwrap();
    let error = settle(dir.path(), &mut |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("cannot read") && error.contains(MODEL), "{error}");
    assert!(waiting.exists());
}

#[cfg(unix)]
#[test]
fn a_folder_that_cannot_be_synced_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    sync_folder(dir.path()).unwrap();
    assert!(sync_folder(&dir.path().join("nowhere")).is_err());
}
