// Hands the sums of row i and column group g of matmul.wgsl to finish(), whole or by element.
$$ set to = "terms" ~ i ~ " += " if row_terms else ""
$$ if out_type == "vec4f"
    {{ to }}{{ mine }}finish({{ part }}{{ row_at(i) }}, {{ col_at(g) }}, {{ sums }}{{ i }}_{{ g }});
$$ else
$$ for j in range(4)
    {{ to }}{{ mine }}finish({{ part }}{{ row_at(i) }}, {{ col_at(g) }} + {{ j }}u, {{ sums }}{{ i }}_{{ g }}.{{ "xyzw"[j] }});
$$ endfor
$$ endif
