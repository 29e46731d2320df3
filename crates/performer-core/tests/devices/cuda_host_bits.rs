//! What must be equal to the bit in the CUDA kernels of FAVOR: outputs whatever comes later, and
//! results in whatever order threads run; and that no two threads race.

use super::cuda_host::{BOTH, Build, Results, Run};
use candle_core::DType;

/// What comes after a token does not change a bit of its output, chunk borders included.
#[test]
fn the_past_has_the_same_bits() {
    for (dtype, dim, rows, teams, gated, wgmma) in [
        (DType::BF16, 64, 128, false, false, false),
        (DType::F32, 16, 32, false, false, false),
        (DType::BF16, 64, 128, true, false, false),
        (DType::F32, 16, 32, false, true, false),
        (DType::BF16, 64, 128, true, true, false),
        (DType::BF16, 64, 128, true, true, true),
    ] {
        let build = Build { teams, exact: teams, gated, wgmma, ..Build::new(dtype, dim, rows) };
        let run = Run { segments: 2, ..Run::default() };
        let problem = build.problem(9, build.shape([1, 1, 1], 150, 150)).scale_qk(2.0);
        let Some(whole) = build.run(&problem, run) else { return };
        for cut in [1, 2, 40, 63, 64, 65, 100, 149] {
            let mut changed = problem.clone();
            changed.k[cut * dim..(cut + 1) * dim].iter_mut().for_each(|x| *x *= 50.0);
            for x in [&mut changed.q, &mut changed.k, &mut changed.v] {
                x[(cut + 1) * dim..].iter_mut().for_each(|x| *x *= -1.5);
            }
            if let Some(gates) = &mut changed.gates {
                gates[cut..].iter_mut().for_each(|gate| *gate = 3.0 * *gate - 1.0);
            }
            let Some(other) = build.run(&changed, run) else { return };
            let past = |r: &Results| r.out[..cut * dim].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(past(&whole) == past(&other), "{dtype:?}: outputs before token {cut} changed");
        }
    }
}

/// Results are the same whether threads run in one order or the other, so no barrier is missing.
#[test]
fn the_order_of_threads_does_not_matter() {
    for (dtype, causal, teams, gated) in [
        (DType::BF16, true, false, false),
        (DType::F32, true, false, false),
        (DType::BF16, false, false, false),
        (DType::BF16, true, true, false),
        (DType::F32, true, false, true),
        (DType::BF16, true, true, true),
    ] {
        let build = Build { causal, teams, gated, ..Build::new(dtype, 16, 48) };
        let problem = build.problem(10, build.shape([1, 1, 1], 130, 130));
        let run = Run { segments: 2, ..BOTH };
        let Some(one) = build.run(&problem, run) else { return };
        let Some(other) = build.run(&problem, Run { descending: true, ..run }) else { return };
        assert!(one.out == other.out && one.q == other.q && one.k == other.k && one.v == other.v, "{build:?}");
        assert!(one.gates == other.gates, "{build:?}");
    }
}

/// Between two accesses of one number, of which one writes, lies a barrier: in both orders of
/// threads, with copies at their latest and at their earliest.
fn check_races(build: Build, tokens: usize) {
    for descending in [false, true] {
        let run = Run { segments: 2, split: 33, descending, races: true, ..BOTH };
        build.check(&build.problem(29, build.shape([1, 1, 1], tokens, tokens)), run);
    }
}

#[test]
fn teams_with_gates_have_no_races() {
    check_races(Build { teams: true, exact: true, ..Build::new(DType::BF16, 32, 64) }.gated(), 70);
}

#[test]
#[ignore = "takes minutes"]
fn kernels_have_no_races() {
    for gated in [false, true] {
        for (dtype, dim, rows, teams) in [
            (DType::F32, 16, 48, false),
            (DType::F32, 64, 128, false),
            (DType::BF16, 16, 48, false),
            (DType::F16, 48, 64, false),
            (DType::BF16, 64, 128, true),
            (DType::BF16, 40, 100, true),
        ] {
            check_races(Build { teams, gated, exact: teams, ..Build::new(dtype, dim, rows) }, 150);
        }
        let teams = Build { teams: true, exact: true, ..Build::new(DType::BF16, 64, 128) };
        check_races(Build { wgmma: true, gated, ..teams }, 150);
    }
    let build = Build { causal: false, ..Build::new(DType::BF16, 16, 48) };
    let problem = build.problem(30, build.shape([1, 1, 1], 70, 130));
    build.check(&problem, Run { segments: 2, races: true, ..BOTH });
}
