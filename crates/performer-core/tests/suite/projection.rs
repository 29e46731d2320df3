//! These tests check projections: exact values, shapes, lengths, orthogonality, names and errors.

use candle_core::{DType, Device};
use performer_core::projection::{ProjectionKind, Radii, derive_seed, draw, draw_offsets, draw_tensor};
use serde::Deserialize;
use serde::de::value::{Error as NameError, StrDeserializer};

use ProjectionKind::{Gaussian, Hadamard, Orthogonal};

fn omega(kind: ProjectionKind, radii: Radii, m: usize, d: usize, seed: u64) -> Vec<f64> {
    draw(kind, radii, m, d, seed).expect("valid arguments")
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn lengths(omega: &[f64], d: usize) -> Vec<f64> {
    omega.chunks_exact(d).map(|row| dot(row, row).sqrt()).collect()
}

#[test]
fn draws_are_pinned_bit_for_bit() {
    use Radii::{Chi, Quantile, Sqrt};
    let small = [0, 7, 14];
    let large = [0, 4100, 6399];
    #[rustfmt::skip]
    let pinned = [
        (Gaussian, Chi, (5, 3), small, [0x3fe3c4df4c454447, 0x3ff36bd046271576, 0x3fd04d18da342044]),
        (Orthogonal, Chi, (5, 3), small, [0x3fe76b34d19a7653, 0x3fa737016c70904f, 0xbfc438aced3ba8c4]),
        (Orthogonal, Sqrt, (100, 64), large, [0x3fe193b1d2ee1d92, 0x3fe1e64e3988e352, 0x3fced065e2d61fc4]),
        (Orthogonal, Quantile, (100, 64), large, [0x3fe2818173288825, 0x3fe07b6a1cd3b3c6, 0x3fc93c4b7a577cbd]),
        (Hadamard, Chi, (7, 5), [0, 20, 34], [0xbfda50103c18c753, 0xc001f4ae8cd4768c, 0x3fd5dd7a41e8209f]),
        (Hadamard, Quantile, (100, 64), large, [0x3ffd7ad50f966ec2, 0xbffb9fca47814672, 0xbff06115506c2bb7]),
    ];
    for (kind, radii, (m, d), at, bits) in pinned {
        let drawn = omega(kind, radii, m, d, 42);
        let got = at.map(|i| drawn[i].to_bits());
        assert_eq!(got, bits, "{kind} {radii} ({m}, {d}) at {at:?}");
    }

    let offsets: Vec<u64> = draw_offsets(3, 42).unwrap().iter().map(|b| b.to_bits()).collect();
    assert_eq!(offsets, [0x40158134609001db, 0x40119c370fe6bdc1, 0x400d73b6f5f995f4]);

    let seeds = [derive_seed(0, 0), derive_seed(42, 1), derive_seed(u64::MAX, u64::MAX)];
    assert_eq!(seeds, [0x48218226ff3cd4bf, 0x57e1faba65107204, 0x2dfe1aa565b7ff81]);
}

#[test]
fn seeds_decide() {
    for kind in ProjectionKind::ALL {
        for radii in Radii::ALL {
            let drawn = omega(kind, radii, 20, 8, 1);
            assert_eq!(drawn, omega(kind, radii, 20, 8, 1), "{kind} {radii}");
            assert_ne!(drawn, omega(kind, radii, 20, 8, 2), "{kind} {radii}");
        }
    }
    assert_eq!(draw_offsets(4, 1).unwrap(), draw_offsets(4, 1).unwrap());
    assert_ne!(draw_offsets(4, 1).unwrap(), draw_offsets(4, 2).unwrap());
}

#[test]
fn derived_seeds_are_distinct_and_mixed() {
    let mut seeds = std::collections::BTreeSet::new();
    for seed in 0..100 {
        seeds.insert(seed);
        for stream in 0..100 {
            let derived = derive_seed(seed, stream);
            assert!(seeds.insert(derived), "derive_seed({seed}, {stream}) came up before");
        }
    }
    // Seed and stream do not commute, and nesting is not addition.
    assert_ne!(derive_seed(1, 2), derive_seed(2, 1));
    assert_ne!(derive_seed(derive_seed(1, 2), 3), derive_seed(derive_seed(1, 3), 2));
    assert_ne!(derive_seed(derive_seed(1, 2), 3), derive_seed(1, 5));
    // One step of either argument flips half of the 64 bits: 32 ± 4 for one pair; there are 400
    // pairs.
    let flips = |other: &dyn Fn(u64) -> u64| -> f64 {
        (0..400).map(|i| f64::from((derive_seed(i, 7) ^ other(i)).count_ones())).sum::<f64>() / 400.0
    };
    for mean in [flips(&|i| derive_seed(i, 8)), flips(&|i| derive_seed(i + 1, 7))] {
        assert!((mean - 32.0).abs() < 1.0, "{mean} bits flip on average");
    }
}

#[test]
fn every_size_is_drawn_and_fewer_rows_are_a_prefix() {
    for kind in ProjectionKind::ALL {
        for radii in Radii::ALL {
            for d in [1, 2, 3, 8, 13] {
                let most = omega(kind, radii, 3 * d + 2, d, 9);
                for m in [1, d, d + 1, 2 * d, 3 * d + 2] {
                    let drawn = omega(kind, radii, m, d, 9);
                    assert_eq!(drawn.len(), m * d, "{kind} {radii} ({m}, {d})");
                    assert!(drawn.iter().all(|w| w.is_finite()), "{kind} {radii} ({m}, {d})");
                    if radii != Radii::Quantile || kind == Gaussian {
                        assert_eq!(drawn, most[..m * d], "{kind} {radii} ({m}, {d})");
                    }
                }
            }
        }
    }
}

#[test]
fn blocks_are_orthogonal_and_independent() {
    let mut cases: Vec<(ProjectionKind, usize)> = [1, 2, 3, 16, 61, 64].map(|d| (Orthogonal, d)).to_vec();
    cases.extend([1, 2, 16, 64].map(|d| (Hadamard, d)));
    for (kind, d) in cases {
        let m = 2 * d + d.div_ceil(2); // the last block is cut
        let drawn = omega(kind, Radii::Sqrt, m, d, 5);
        let row = |i: usize| &drawn[i * d..][..d];
        let mut across = 0.0;
        for i in 0..m {
            for j in 0..i {
                let cosine = dot(row(i), row(j)) / d as f64;
                if i / d == j / d {
                    assert!(cosine.abs() < 1e-12, "{kind}, d = {d}: rows {j} and {i} have {cosine}");
                } else {
                    across += cosine * cosine;
                }
            }
        }
        // Rows of independent blocks have cosines of mean square 1/d.
        let pairs = (d * d + 2 * d * (m - 2 * d)) as f64;
        let ratio = across / pairs * d as f64;
        assert!((0.5..2.0).contains(&ratio), "{kind}, d = {d}: mean square cosine across blocks is {ratio} / d");
        if d > 2 {
            assert_ne!(drawn[..d * d], drawn[d * d..2 * d * d], "{kind}, d = {d}: two equal blocks");
        }
    }
}

#[test]
fn sqrt_lengths_are_exact() {
    for (kind, d) in [(Orthogonal, 1), (Orthogonal, 3), (Orthogonal, 64), (Hadamard, 1), (Hadamard, 2), (Hadamard, 64)]
    {
        for length in lengths(&omega(kind, Radii::Sqrt, 2 * d + 1, d, 4), d) {
            assert!((length / (d as f64).sqrt() - 1.0).abs() < 1e-14, "{kind}, d = {d}: {length}");
        }
    }
}

#[test]
fn quantile_lengths_are_the_quantiles_in_random_order() {
    let (m, d) = (9, 2);
    for kind in [Orthogonal, Hadamard] {
        let drawn = lengths(&omega(kind, Radii::Quantile, m, d, 8), d);
        let mut sorted = drawn.clone();
        sorted.sort_by(f64::total_cmp);
        assert_ne!(drawn, sorted, "{kind}: in order");
        for (i, length) in sorted.into_iter().enumerate() {
            let level = (i + 1) as f64 / (m + 1) as f64;
            let expected = (-2.0 * (1.0 - level).ln()).sqrt();
            assert!((length - expected).abs() < 1e-12, "{kind}: {length}, expected {expected}");
        }
    }
}

/// Keeping d of p columns is the same as padding vectors with zeros, and costs orthogonality.
#[test]
fn hadamard_of_another_size_is_cut_from_the_next_power_of_two() {
    for radii in Radii::ALL {
        let (whole, cut) = (omega(Hadamard, radii, 11, 8, 2), omega(Hadamard, radii, 11, 5, 2));
        for (whole, cut) in whole.chunks_exact(8).zip(cut.chunks_exact(5)) {
            assert_eq!(whole[..5], *cut, "{radii}");
        }
    }
    let cut = omega(Hadamard, Radii::Sqrt, 8, 5, 2);
    let skew = (1..8).map(|i| dot(&cut[..5], &cut[i * 5..][..5]).abs()).fold(0.0, f64::max);
    assert!(skew > 0.1, "rows of 5 of 8 columns are orthogonal to {skew}");
}

#[test]
fn tensors_hold_the_rounded_draw() -> candle_core::Result<()> {
    let drawn = omega(Orthogonal, Radii::Chi, 6, 4, 1);
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let tensor = draw_tensor(Orthogonal, Radii::Chi, 6, 4, 1, dtype, &Device::Cpu)?;
        assert_eq!((tensor.dims(), tensor.dtype()), (&[6, 4][..], dtype));
        let precision = match dtype {
            DType::F64 => 0.0,
            DType::F32 => 2f64.powi(-24),
            DType::F16 => 2f64.powi(-11),
            _ => 2f64.powi(-8),
        };
        let values = tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
        for (got, expected) in values.iter().zip(&drawn) {
            assert!((got - expected).abs() <= precision * expected.abs(), "{dtype:?}: {got}, expected {expected}");
        }
    }
    Ok(())
}

#[test]
fn errors_say_what_was_wrong() {
    let text = |result: candle_core::Result<Vec<f64>>| result.expect_err("an error").to_string();
    for kind in ProjectionKind::ALL {
        let no_rows = text(draw(kind, Radii::Chi, 0, 4, 1));
        assert!(no_rows.contains("m, the number of random features, is 0; it must be at least 1"), "{no_rows}");
        let no_columns = text(draw(kind, Radii::Chi, 4, 0, 1));
        assert!(no_columns.contains("d, the dimension of a query or key, is 0; it must be at least 1"), "{no_columns}");
        for (m, d) in [(usize::MAX, 2), (2, usize::MAX), (1, usize::MAX / 2)] {
            let huge = text(draw(kind, Radii::Sqrt, m, d, 1));
            assert!(huge.contains(&format!("m = {m} rows of d = {d} numbers do not fit in memory")), "{huge}");
        }
    }
    let no_offsets = text(draw_offsets(0, 1));
    assert!(no_offsets.contains("m, the number of random features, is 0"), "{no_offsets}");
    let integers =
        draw_tensor(Gaussian, Radii::Chi, 2, 2, 1, DType::U32, &Device::Cpu).expect_err("an error").to_string();
    assert!(integers.contains("dtype is u32; it must be a floating-point type"), "{integers}");
}

#[test]
fn names_are_the_same_everywhere() {
    fn serde_name<'a, T: Deserialize<'a>>(name: &'a str) -> Result<T, NameError> {
        T::deserialize(StrDeserializer::new(name))
    }
    for kind in ProjectionKind::ALL {
        let name = kind.to_string();
        assert_eq!(name.parse::<ProjectionKind>().unwrap(), kind);
        assert_eq!(serde_name::<ProjectionKind>(&name).unwrap(), kind);
    }
    for radii in Radii::ALL {
        let name = radii.to_string();
        assert_eq!(name.parse::<Radii>().unwrap(), radii);
        assert_eq!(serde_name::<Radii>(&name).unwrap(), radii);
    }
    let unknown = "Gauss".parse::<ProjectionKind>().expect_err("an error").to_string();
    assert!(
        unknown.contains("unknown projection \"Gauss\": it must be one of gaussian, orthogonal, hadamard"),
        "{unknown}"
    );
    let unknown = "".parse::<Radii>().expect_err("an error").to_string();
    assert!(unknown.contains("unknown radii \"\": it must be one of chi, sqrt, quantile"), "{unknown}");
    assert_eq!((ProjectionKind::default(), Radii::default()), (Orthogonal, Radii::Chi));
}
