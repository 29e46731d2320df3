//! How the CUDA kernels divide FAVOR into thread blocks, chunks and segments: by the sizes of the
//! problem and the shared memory that a thread block may have. Where a card allows more than an
//! A100, the caller gives that of an A100, so that all such cards divide a problem alike. Cards
//! that allow less may take smaller slices and chunks; then their results are rounded otherwise.

use std::fmt;

/// The type of a tensor's numbers, as the macro `STORAGE` of the CUDA sources has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum StoredType {
    F32 = 0,
    F16 = 1,
    Bf16 = 2,
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (*self as u8).fmt(f)
    }
}

/// Where features come from, as the macro `MAP` of `favor.cuh` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum MapKind {
    /// The kernel computes them.
    Computed = 0,
    /// Rows are log-features.
    Log = 1,
    /// Rows are signed features.
    Signed = 2,
    /// The kernel computes them, and keys have rows and weights of their own.
    OwnKeys = 3,
}

impl MapKind {
    /// Whether the kernel computes features from queries and keys.
    pub(crate) fn is_computed(self) -> bool {
        matches!(self, Self::Computed | Self::OwnKeys)
    }
}

impl fmt::Display for MapKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (*self as u8).fmt(f)
    }
}

/// The most features that the kernels take.
pub(crate) const MOST_FEATURES: usize = 512;
/// The largest head dimension and value dimension that the kernels take.
pub(crate) const MOST_WIDTH: usize = 128;

/// The most tokens of a segment of a pass that gives gates their gradients. A thread block of
/// `favor_gates.cu` takes no more (its THREADS times EACH): a longer segment would have gradients
/// that nobody writes. Rounding errors gather within a segment, too.
const MOST_GATED: usize = 1024;

/// The number of thread blocks that keeps a large card busy.
const ENOUGH: usize = 256;
/// The warps of a thread block.
const WARPS: usize = 8;
/// The threads of a team: a thread block of the kernels for bf16.
pub(crate) const TEAM: usize = 128;

/// `Blocks` holds the sizes that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// What tensors hold.
    pub(crate) storage: StoredType,
    pub(crate) map: MapKind,
    /// The head dimension, where features are computed in the kernel.
    pub(crate) dim: usize,
    /// The number of features `F`.
    pub(crate) features: usize,
    /// The value dimension `Dv`.
    pub(crate) values: usize,
    /// The value dimensions that a thread block takes: a multiple of 16.
    pub(crate) slice: usize,
    /// The most tokens of a chunk.
    pub(crate) chunk: usize,
    /// Whether these are for the kernels for bf16 (`favor_bf16.cuh`), whose thread blocks are
    /// teams.
    pub(crate) teams: bool,
    /// Whether there are forget gates.
    pub(crate) gated: bool,
}

impl Blocks {
    /// Chooses the largest slice and chunk whose sums fit the registers, and whose tiles fit the
    /// shared memory of a thread block, `most` bytes.
    pub(crate) fn choose(
        causal: bool,
        gated: bool,
        storage: StoredType,
        map: MapKind,
        [dim, features, values]: [usize; 3],
        most: usize,
    ) -> Self {
        let f = features.next_multiple_of(16);
        let chunk = match (storage, f) {
            (StoredType::F32, 257..) => 16,
            (StoredType::F32, _) | (_, 129..) => 32,
            _ => 64,
        };
        // A thread holds at most 64 sums.
        let registers = 32 * WARPS * 64 / f.next_multiple_of(64) / 32 * 32;
        let slice = values.next_multiple_of(16).min(registers.max(16));
        let mut blocks = Self { storage, map, dim, features, values, slice, chunk, teams: false, gated };
        let sizes = dim <= 64 && features <= 128 && values <= 64;
        blocks.teams = causal
            && storage == StoredType::Bf16
            && map == MapKind::Computed
            && sizes
            && blocks.shared_of_teams().backward <= most;
        // Gates do not change slices: a state may be made without gates and continued with them, so
        // its sums must have one layout. Teams were chosen above with the gates that there are, so
        // where shared memory is scarce, a problem may have teams without gates and none with them.
        blocks.gated = true;
        while !blocks.teams && blocks.shared_backward().max(blocks.shared_forward()) > most {
            if blocks.slice > 32 {
                blocks.slice = (blocks.slice / 2).next_multiple_of(16);
            } else if blocks.chunk > 16 {
                blocks.chunk /= 2;
            } else if blocks.slice > 16 {
                blocks.slice = 16;
            } else {
                break;
            }
        }
        Self { gated, ..blocks }
    }

    /// Whether thread blocks have room on a card with `most` bytes of shared memory for each, which
    /// is what the blocks were chosen for.
    pub(crate) fn fit(&self, most: usize) -> bool {
        self.teams || self.shared_forward().max(self.shared_backward()) <= most
    }

    /// The shared memory of a decoding step of `group` query heads to a key head, in bytes.
    pub(crate) fn shared_step(&self, group: usize) -> usize {
        4 * (self.f() * (3 + group) + group + 32 * WARPS / self.slice * group * self.slice)
    }

    /// The number of slices of the values; each is the work of one thread block.
    pub(crate) fn splits(&self) -> usize {
        self.values.div_ceil(self.slice)
    }

    /// The length of a record, the sums of one head in memory: for each feature a scale, a
    /// normaliser and a row of values.
    pub(crate) fn record(&self) -> usize {
        self.f() * (2 + self.splits() * self.slice)
    }

    /// The number of features, padded to tiles of 16.
    pub(crate) fn f(&self) -> usize {
        self.features.next_multiple_of(16)
    }

    /// The number of segments of a sequence and the tokens of each. There is more than one segment
    /// where the heads alone are too few to keep a card busy, or where gates get gradients
    /// (`tracked`) of a long sequence.
    pub(crate) fn segments(&self, heads: usize, tokens: usize, tracked: bool) -> (usize, usize) {
        // A segment shorter than a few chunks costs more than it gains.
        let wanted = ENOUGH.div_ceil(heads * self.splits()).min(tokens / (8 * self.chunk)).max(1);
        let length = tokens.div_ceil(wanted).next_multiple_of(self.chunk);
        let length = if self.gated && tracked { length.min(MOST_GATED) } else { length };
        (tokens.div_ceil(length), length)
    }

    /// The bytes of an operand in shared memory, and the operands by which each row is padded.
    fn operand(&self) -> (usize, usize) {
        if self.storage == StoredType::F32 { (4, 4) } else { (2, 8) }
    }

    /// The bytes of a tile of operands.
    fn tile(&self, rows: usize, columns: usize) -> usize {
        let (bytes, pad) = self.operand();
        rows * (columns + pad) * bytes
    }

    /// The groups of rows in which warps stand; see `Sums` in `tile.cuh`.
    fn row_groups(&self) -> usize {
        if self.chunk == 64 { 2 } else { 1 }
    }

    /// The warps of a group, among which columns are dealt out.
    fn turns(&self) -> usize {
        WARPS / self.row_groups()
    }

    /// The bytes of `Gates` in `favor.cuh`: a number for each row of a chunk, and one more, padded.
    fn gates(&self) -> usize {
        if self.gated { 4 * self.chunk + 16 } else { 0 }
    }

    /// The bytes of `Side` in `favor.cuh`: the rows of queries or keys of a chunk, and an offset
    /// for each.
    fn side(&self) -> usize {
        let parts = if self.storage == StoredType::F16 { 2 } else { 1 };
        let dim = if self.map.is_computed() { self.dim.next_multiple_of(16) } else { 16 };
        parts * self.tile(self.chunk, dim) + 4 * self.chunk
    }

    /// The shared memory of the kernels that make sums, in bytes: the size of `Builder` in
    /// `favor.cuh`.
    pub(crate) fn shared_sums(&self) -> usize {
        let (c, f, v) = (self.chunk, self.f(), self.slice);
        let tiles = self.tile(c, v) + self.tile(c, f) + self.tile(f, v);
        self.side() + self.gates() + tiles + 4 * (c + f * (5 + 2 * self.row_groups()) + self.turns() * c)
    }

    /// The shared memory of the forward kernel, in bytes.
    pub(crate) fn shared_forward(&self) -> usize {
        let c = self.chunk;
        self.shared_sums() + self.side() + self.tile(c, self.f()) + self.tile(c, c) + 4 * c * (3 * self.turns() + 2)
    }

    /// The shared memory of the kernels that compute gradients, in bytes.
    pub(crate) fn shared_backward(&self) -> usize {
        let c = self.chunk;
        let weights = self.tile(c, self.f().max(c)) + self.tile(c, c);
        self.shared_sums()
            + self.side()
            + self.tile(c, self.slice)
            + weights.max(self.tile(self.f(), self.slice))
            + 4 * c * (1 + 3 * self.turns())
    }
}

/// `SharedBytes` holds the shared memory of a thread block in the kernels of each pass, in bytes.
#[derive(Debug)]
pub(crate) struct SharedBytes {
    pub(crate) sums: usize,
    pub(crate) forward: usize,
    pub(crate) backward: usize,
}

impl Blocks {
    /// The shared memory of the kernels of teams, for thread blocks of [`TEAM`] threads.
    pub(crate) fn shared_of_teams(&self) -> SharedBytes {
        let (c, features) = (self.chunk, self.features.next_multiple_of(64));
        let (rows, values) = (self.tile(c, self.dim.next_multiple_of(16)), self.tile(c, self.slice));
        let rest = self.tile(features, self.slice);
        let chunk = self.tile(features, c);
        let sums = self.gates() + rows + values + chunk + rest + 4 * (2 * c + 2 * features + 4);
        let low = if self.gated { chunk } else { 0 };
        SharedBytes { sums, forward: sums + rows, backward: sums + rest + rows + values + c / 16 * features * 4 + low }
    }

    /// Returns whether the kernels of `favor_wgmma.cuh` take these sizes. They also need a
    /// projection that is exact in bf16, which the caller checks.
    pub(crate) fn for_warpgroups(&self) -> bool {
        self.teams && self.dim.next_multiple_of(16) == 64 && self.slice == 64
    }

    /// The shared memory of the forward kernel of teams with products of warpgroups, in bytes. It
    /// is `TeamForward` of `favor_bf16_forward.cu`: the `GroupBuilder` of `favor_wgmma.cuh`, and a
    /// padded tile of queries. A builder has gates, if there are any, then matrices with rows of
    /// 128 bytes, which begin at multiples of 1,024 bytes, then units of 16 bytes a row, and then
    /// offsets, units, scales, norms and four breaks, of 4 bytes each.
    pub(crate) fn warpgroup_forward(&self) -> usize {
        const EIGHT_ROWS: usize = 1024;
        let (c, features) = (self.chunk, self.features.next_multiple_of(64));
        let rows = (2 * c + 3 * features) * EIGHT_ROWS / 8;
        let rest = 16 * (c + features) + 4 * (2 * c + 2 * features + 4);
        let builder = self.gates().next_multiple_of(EIGHT_ROWS) + rows + rest;
        (builder.next_multiple_of(EIGHT_ROWS) + self.tile(c, 64)).next_multiple_of(EIGHT_ROWS)
    }
}

#[cfg(test)]
mod tests {
    use super::{MapKind::*, StoredType::*, *};

    /// By their codes.
    const STORAGES: [StoredType; 3] = [F32, F16, Bf16];
    const MAPS: [MapKind; 4] = [Computed, Log, Signed, OwnKeys];

    /// The macros say by numbers what tensors hold and where features come from, and the kernels'
    /// sources say what the numbers mean.
    #[test]
    fn codes_are_those_of_the_sources() {
        for (i, storage) in STORAGES.into_iter().enumerate() {
            assert_eq!(storage.to_string(), i.to_string());
        }
        for (i, map) in MAPS.into_iter().enumerate() {
            assert_eq!(map.to_string(), i.to_string());
        }
        let (stored, tile) = (include_str!("../cuda/stored.cuh"), include_str!("../cuda/tile.cuh"));
        for source in [stored, tile] {
            assert!(source.contains("0 f32, 1 f16, 2 bf16"), "what STORAGE means is written in words");
        }
        let types =
            "#if STORAGE == 0\ntypedef float Stored;\n#elif STORAGE == 1\ntypedef Half Stored;\n#else\ntypedef Bfloat";
        assert!(stored.contains(types), "f32 is 0, f16 is 1, bf16 is the rest");
        let favor = include_str!("../cuda/favor.cuh");
        assert!(favor.contains("READY = MAP == 1 || MAP == 2, SIGNED = MAP == 2, OWN_KEYS = MAP == 3;"));
    }

    /// The most shared memory of a thread block on A100 and on H100.
    const CARDS: [usize; 2] = [163 << 10, 227 << 10];

    #[test]
    fn every_size_fits() {
        for storage in STORAGES {
            for dim in [16, 64, MOST_WIDTH] {
                for features in [16, 24, 128, 256, MOST_FEATURES] {
                    for most in CARDS {
                        let b = Blocks::choose(false, false, storage, Computed, [dim, features, dim], most);
                        assert_eq!(b.record() % b.f(), 0);
                        assert!(b.fit(most) && b.shared_forward().max(b.shared_backward()) <= most, "{b:?}");
                    }
                }
            }
        }
    }

    /// Cards with 99 KiB have room for the usual numbers of features and not for the largest, which
    /// are not given to the kernels there.
    #[test]
    fn smaller_cards_have_room_for_fewer_features() {
        let fit = |storage, dim, features| {
            Blocks::choose(true, true, storage, Computed, [dim, features, dim], 99 << 10).fit(99 << 10)
        };
        for storage in STORAGES {
            for dim in [16, 64, MOST_WIDTH] {
                assert!(fit(storage, dim, 128) && fit(storage, dim, 256), "{storage:?}, {dim}");
            }
        }
        assert!(!fit(F32, 64, MOST_FEATURES) && !fit(F32, MOST_WIDTH, MOST_FEATURES));
    }

    /// A step for many query heads of one key head may have no room where a pass has.
    #[test]
    fn steps_of_many_heads_take_more_room() {
        let b = Blocks::choose(true, false, F32, Computed, [64, 256, 64], CARDS[1]);
        assert!(b.fit(CARDS[1]) && b.shared_step(8) <= CARDS[1] && b.shared_step(128) > CARDS[1]);
    }

    /// Teams keep their sizes on cards with 99 KiB too, where the thread blocks of other kernels
    /// shrink.
    #[test]
    fn teams_take_whole_chunks_and_values() {
        for most in [99 << 10, CARDS[0], CARDS[1]] {
            for (dim, features) in [(16, 16), (24, 100), (64, 64), (64, 128)] {
                let b = Blocks::choose(true, false, Bf16, Computed, [dim, features, dim], most);
                assert!(b.teams && b.chunk == 64 && b.splits() == 1, "{b:?}");
            }
        }
        for (causal, storage, map, dim, features) in [
            (false, Bf16, Computed, 64, 128),
            (true, F16, Computed, 64, 128),
            (true, F32, Log, 64, 128),
            (true, Bf16, OwnKeys, 64, 128),
            (true, Bf16, Computed, 80, 128),
            (true, Bf16, Computed, 64, 129),
        ] {
            assert!(!Blocks::choose(causal, false, storage, map, [dim, features, 64], CARDS[1]).teams);
        }
        assert!(!Blocks::choose(true, false, Bf16, Computed, [64, 128, 64], 64 << 10).teams);
    }

    #[test]
    fn segments_cover_all_tokens() {
        let blocks = |gated| Blocks::choose(true, gated, Bf16, Computed, [64, 128, 64], CARDS[1]);
        assert_eq!(blocks(false).segments(256, 4096, true), (1, 4096));
        assert_eq!(blocks(true).segments(256, 4096, false), (1, 4096));
        assert_eq!(blocks(true).segments(256, 4096, true), (4, 1024));
        for (heads, tokens) in [(1, 1), (8, 1000), (8, 1 << 20), (64, 4096), (3, 777)] {
            for gated in [false, true] {
                let (count, length) = blocks(gated).segments(heads, tokens, true);
                assert!(
                    count * length >= tokens && (count - 1) * length < tokens,
                    "{heads} {tokens}: {count} of {length}"
                );
            }
        }
    }

    /// A state that was made without gates goes on with them: both have the same records.
    #[test]
    fn records_are_alike_with_gates_and_without() {
        for storage in STORAGES {
            for (dim, features) in [(16, 24), (40, 100), (64, 128), (128, 128), (128, 256), (48, 512)] {
                let both = |most| {
                    [false, true]
                        .map(|gated| Blocks::choose(true, gated, storage, Computed, [dim, features, dim], most))
                };
                // From the least shared memory that a card has on.
                for most in (99 << 10..CARDS[0]).step_by(1 << 10) {
                    let [without, with] = both(most);
                    assert_eq!(without.record(), with.record(), "{most}: {without:?}");
                }
                for most in CARDS {
                    let [without, with] = both(most);
                    assert_eq!((without.record(), without.teams), (with.record(), with.teams), "{without:?}");
                    let backward = if with.teams { with.shared_of_teams().backward } else { with.shared_backward() };
                    assert!(with.gated && !without.gated && backward <= most, "{with:?}");
                }
            }
        }
    }

    /// The sizes in `kernels.txt` are those computed here; NVRTC checks them against the kernels'
    /// own.
    #[test]
    fn listed_kernels_have_these_sizes() {
        let mut seen = 0;
        for line in include_str!("../cuda/kernels.txt").lines().filter(|line| line.contains("FEATURES=")) {
            let value = |name: &str| -> Option<usize> {
                line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
            };
            let size = |name: &str| value(name).unwrap_or_else(|| panic!("{line}: no {name}"));
            let sizes = [size("DIM"), size("FEATURES"), size("VALUES")];
            let team = line.contains("/favor_bf16_");
            let gated = size("GATED") == 1;
            let blocks = Blocks::choose(team, gated, STORAGES[size("STORAGE")], MAPS[size("MAP")], sizes, CARDS[0]);
            assert_eq!((blocks.slice, blocks.chunk), (size("SLICE"), size("CHUNK")), "{line}");
            assert_eq!(team, blocks.teams, "{line}");
            let SharedBytes { sums, forward, backward } = if team {
                blocks.shared_of_teams()
            } else {
                SharedBytes {
                    sums: blocks.shared_sums(),
                    forward: blocks.shared_forward(),
                    backward: blocks.shared_backward(),
                }
            };
            let forward = if value("WGMMA") == Some(1) {
                assert!(blocks.for_warpgroups(), "{line}");
                blocks.warpgroup_forward()
            } else {
                forward
            };
            let of = [("SHARED_FORWARD", forward), ("SHARED_SUMS", sums), ("SHARED_BACKWARD", backward)];
            for (name, bytes) in of {
                if let Some(listed) = value(name) {
                    assert_eq!(listed, bytes, "{line}");
                    seen += 1;
                }
            }
        }
        assert!(seen > 0);
    }
}
