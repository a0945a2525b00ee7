//! Rows in the blocks that a file holds.

use super::testing::block_model;
use crate::dequant::dequantise;
use crate::source::{SourceDtype, WeightSource, common_dtype};
use crate::weights::layer_weight;
use quire_engine::ops::BlockFormat;

const Q4_1: u32 = 3;
const Q5_0: u32 = 6;
const Q4_K: u32 = 12;
const Q6_K: u32 = 14;

/// Queries and keys, too, which are stored in another order.
#[test]
fn blocks_of_a_row_are_those_of_its_values() {
    let (spec, source) = block_model([Q6_K, Q4_1, Q5_0, Q4_K]);
    let mut names = vec!["model.embed_tokens.weight".to_owned()];
    names.extend(
        ["q", "k", "v", "o"].map(|p| layer_weight(1, &format!("self_attn.{p}_proj.weight"))),
    );
    for name in names {
        let (rows, dtype) = (source.shape(&name).unwrap()[0], source.dtype(&name).unwrap());
        for row in 0..rows {
            let mut want = vec![0.0; spec.hidden_size];
            source.read_row(&name, row, &mut want).unwrap();
            let mut got = vec![f32::NAN; spec.hidden_size];
            dequantise(dtype, source.stored_row(&name, row).unwrap(), &mut got);
            assert_eq!(got, want, "row {row} of {name}");
        }
        assert_eq!(source.stored_row(&name, rows), None);
    }
    assert_eq!(source.stored_row("model.norm.weight", 0), None);
    assert_eq!(source.stored_row("none", 0), None);
}

#[test]
fn matrices_have_a_format_where_all_parts_have_it() {
    let (_, source) = block_model([Q6_K, Q4_1, Q5_0, Q4_1]);
    let format = |parts: &[&str]| {
        let names = parts.iter().map(|part| layer_weight(0, &format!("{part}_proj.weight")));
        common_dtype(&source, &names.collect::<Vec<_>>())?.block_format()
    };
    let (q, k, v) = ("self_attn.q", "self_attn.k", "self_attn.v");
    assert_eq!(format(&[q, k]), Some(BlockFormat::Q4_1));
    assert_eq!(format(&[q, k, v]), None);
    assert_eq!(format(&[v, q]), None);
    assert_eq!(format(&[v]), None, "{} is unpacked", SourceDtype::Q5_0);
    assert_eq!(format(&[q, "mlp.none"]), None);
}
