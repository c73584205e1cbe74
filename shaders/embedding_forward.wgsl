// out[r,i] = weight[tokens[r] - first_row, i], for the tokens whose rows this piece of the table holds
$$ set columns = d_model // 4 if "out" in vec4 else d_model
$$ set count = rows * columns
fn element(i: u32) {
    let token = tokens[i / {{ columns }}u];
$$ if first_row == 0
    // The first piece writes the other pieces' rows too, so that no element is left unwritten.
    out[i] = weight[min(token, piece_rows - 1u) * {{ columns }}u + i % {{ columns }}u] * f32(token < piece_rows);
$$ else
    if (token >= {{ first_row }}u && token - {{ first_row }}u < piece_rows) {
        out[i] = weight[(token - {{ first_row }}u) * {{ columns }}u + i % {{ columns }}u];
    }
$$ endif
}
{$ include "include/each_element.wgsl" $}
