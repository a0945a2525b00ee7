//! ggml's tensor types: the ones that can be read, and the names of the others for messages.

use crate::source::SourceDtype;

/// The type with number `id` in `enum ggml_type`, or else its name.
pub(super) fn tensor_type(id: u32) -> Result<SourceDtype, String> {
    match id {
        0 => Ok(SourceDtype::F32),
        1 => Ok(SourceDtype::F16),
        2 => Ok(SourceDtype::Q4_0),
        3 => Ok(SourceDtype::Q4_1),
        6 => Ok(SourceDtype::Q5_0),
        7 => Ok(SourceDtype::Q5_1),
        8 => Ok(SourceDtype::Q8_0),
        10 => Ok(SourceDtype::Q2K),
        11 => Ok(SourceDtype::Q3K),
        12 => Ok(SourceDtype::Q4K),
        13 => Ok(SourceDtype::Q5K),
        14 => Ok(SourceDtype::Q6K),
        20 => Ok(SourceDtype::Iq4Nl),
        23 => Ok(SourceDtype::Iq4Xs),
        30 => Ok(SourceDtype::Bf16),
        39 => Ok(SourceDtype::Mxfp4),
        other => Err(unsupported_name(other).map_or_else(|| format!("number {other}"), Into::into)),
    }
}

fn unsupported_name(id: u32) -> Option<&'static str> {
    Some(match id {
        4 => "Q4_2",
        5 => "Q4_3",
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        31 => "Q4_0_4_4",
        32 => "Q4_0_4_8",
        33 => "Q4_0_8_8",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36 => "IQ4_NL_4_4",
        37 => "IQ4_NL_4_8",
        38 => "IQ4_NL_8_8",
        40 => "NVFP4",
        41 => "Q1_0",
        _ => return None,
    })
}
