// out[r,i] = scale * weight[tokens[r] - first_row, i], for the tokens whose rows this piece of the table holds; a weight that is
// stored as i8 counts weight_scale[row] times
$$ set packed = "out" in vec4
$$ set columns = d_model // 4 if packed else d_model
$$ set count = rows * columns
$$ if weight_dtype != "f32"
$$ set name, dtype, aligned = "weight", weight_dtype, packed
{$ include "include/stored.wgsl" $}
$$ endif

fn element_of(row: u32, column: u32) -> {{ "vec4f" if packed else "f32" }} {
$$ if weight_dtype == "f32"
    let value = weight[row * {{ columns }}u + column];
$$ elif packed
    let value = four_weight((row * {{ columns }}u + column) * 4u);
$$ else
    let value = four_weight(row * {{ columns }}u + column).x;
$$ endif
    return value{{ " * weight_scale[row]" if weight_dtype == "i8" }}{{ " * " ~ (scale | f32) if scale != 1.0 }};
}

fn element(i: u32) {
    let token = tokens[i / {{ columns }}u];
$$ if first_row == 0
    // The first piece writes the other pieces' rows too, so that no element is left unwritten.
    out[i] = element_of(min(token, piece_rows - 1u), i % {{ columns }}u) * f32(token < piece_rows);
$$ else
    if (token >= {{ first_row }}u && token - {{ first_row }}u < piece_rows) {
        out[i] = element_of(token - {{ first_row }}u, i % {{ columns }}u);
    }
$$ endif
}
{$ include "include/each_element.wgsl" $}
