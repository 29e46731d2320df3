//! The choice of the instructions that kernels use, made when the program runs.

use pulp::Arch;

/// Returns the widest vectors that the machine has: AVX-512, AVX2 or NEON, or none.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(super) fn arch() -> Arch {
    Arch::new()
}

/// Returns the widest vectors that the machine has: AVX-512, AVX2 or NEON, or none. In builds with
/// debug assertions, as tests are, the environment variable `PERFORMER_TEST_SIMD` asks for narrower
/// ones (`avx2`, `scalar`), so that one machine tests the code for others (`just test-simd`).
#[cfg(debug_assertions)]
pub(super) fn arch() -> Arch {
    static CHOSEN: std::sync::LazyLock<Arch> =
        std::sync::LazyLock::new(|| asked(std::env::var("PERFORMER_TEST_SIMD").ok().as_deref()));
    *CHOSEN
}

/// Returns the vectors of this name, which are not passed over where the machine lacks them: a test
/// would test something else.
#[cfg(debug_assertions)]
fn asked(name: Option<&str>) -> Arch {
    match name {
        None => Arch::new(),
        Some("scalar") => Arch::Scalar,
        #[cfg(target_arch = "x86_64")]
        Some("avx2") => Arch::V3(pulp::x86::V3::try_new().expect("PERFORMER_TEST_SIMD: this machine has no AVX2")),
        Some(other) => panic!("PERFORMER_TEST_SIMD is {other}; on this machine it can be avx2 (x86-64) or scalar"),
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use pulp::{Simd, WithSimd};

    use super::*;

    struct Lanes;

    impl WithSimd for Lanes {
        type Output = usize;
        fn with_simd<S: Simd>(self, _: S) -> usize {
            S::F32_LANES
        }
    }

    /// A run of the tests that asks for vectors has them, and one that does not has the widest.
    #[test]
    fn the_vectors_are_those_that_were_asked_for() {
        let lanes = arch().dispatch(Lanes);
        match std::env::var("PERFORMER_TEST_SIMD").as_deref() {
            Ok("scalar") => assert_eq!(lanes, 1),
            Ok("avx2") => assert_eq!(lanes, 8),
            _ => assert_eq!(lanes, Arch::new().dispatch(Lanes)),
        }
        assert_eq!(asked(Some("scalar")).dispatch(Lanes), 1);
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
            assert_eq!(asked(Some("avx2")).dispatch(Lanes), 8);
        }
        #[cfg(target_arch = "aarch64")]
        assert_eq!(asked(None).dispatch(Lanes), 4);
    }
}
