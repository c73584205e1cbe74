// Hands c[i, g] of matmul.wgsl to finish(), whole or by element.
$$ if out_type == "vec4f"
    finish({{ part }}{{ row }}, {{ col }}, c{{ i }}_{{ g }});
$$ else
$$ for j in range(4)
    finish({{ part }}{{ row }}, {{ col }} + {{ j }}u, c{{ i }}_{{ g }}.{{ "xyzw"[j] }});
$$ endfor
$$ endif
