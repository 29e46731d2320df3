//! This module shortens the names of attentions for a chart: what all of them have is said once.

/// Removes the options that every one of these attentions has from their names, and returns the
/// short names with these options, joined by commas. A single attention keeps its name, and so do
/// all of them where one differs between heads.
pub(super) fn short(specs: &[&str]) -> (Vec<String>, String) {
    let mut shared: Vec<&str> = Vec::new();
    if specs.len() > 1 && !specs.iter().any(|spec| spec.contains('|')) {
        let every: Vec<Vec<&str>> = specs.iter().flat_map(|spec| parts(spec)).map(|part| options(part)).collect();
        let first = every.first().into_iter().flatten().copied();
        shared = first.filter(|option| every.iter().all(|options| options.contains(option))).collect();
    }
    let names = specs.iter().map(|spec| {
        let kept: Vec<String> = parts(spec).map(|part| without(part, &shared)).collect();
        let place = spec.rsplit_once('/').map_or_else(String::new, |(_, place)| format!("/{place}"));
        kept.join("+") + &place
    });
    (names.collect(), shared.join(","))
}

/// Returns the attentions of a pattern `A+B/n`, without its place.
fn parts(spec: &str) -> impl Iterator<Item = &str> {
    spec.rsplit_once('/').map_or(spec, |(attentions, _)| attentions).split('+')
}

fn options(attention: &str) -> Vec<&str> {
    attention.split_once(':').map_or_else(Vec::new, |(_, options)| options.split(',').collect())
}

fn without(attention: &str, shared: &[&str]) -> String {
    let kind = attention.split_once(':').map_or(attention, |(kind, _)| kind);
    let kept: Vec<&str> = options(attention).into_iter().filter(|option| !shared.contains(option)).collect();
    if kept.is_empty() { kind.to_string() } else { format!("{kind}:{}", kept.join(",")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_have_is_said_once() {
        let specs =
            ["softmax:gate,conv", "favor:m=64,gate,conv+softmax:window=75,gate,conv/first", "uniform:gate,conv"];
        let (names, shared) = short(&specs);
        assert_eq!(names, ["softmax", "favor:m=64+softmax:window=75/first", "uniform"]);
        assert_eq!(shared, "gate,conv");
    }

    #[test]
    fn what_one_lacks_stays() {
        for specs in [
            &["softmax:gate", "favor:m=64"][..],
            &["softmax", "favor:m=64,gate"],
            &["favor:m=64,gate"],
            &["favor:m=8|softmax,gate", "softmax:gate"],
        ] {
            let (names, shared) = short(specs);
            assert_eq!((&names[..], &shared[..]), (&specs.iter().map(ToString::to_string).collect::<Vec<_>>()[..], ""));
        }
    }
}
